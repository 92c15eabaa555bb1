"""Every instruction of flashnumba/ptx on a GPU against its own Python body; what it compiles to.

The kernels and the rules by which results must agree are in ptx_cases.py. Without a GPU it is
tested here that no instruction is left out, that each matters for the results that are compared,
and that the compiled kernels hold the machine's instructions and nothing they should not.
"""

import re
import struct
from collections import Counter
from functools import cache

import numpy as np
import ptx_cases
import pytest
from calls import to_gpu
from ptx_cases import PARTS_SIZES, SIZES, TF32_FORMS, cases, instructions, name_of, used_by
from test_runtime import needs_compilers

from flashnumba import runtime, simulate
from flashnumba.ptx import mma_tf32
from flashnumba.tensormap import TensorMap

NAMES = list(cases())
# One size of product each: all sizes, both dtypes, few enough to compile.
PRODUCTS = [f"wgmma-{n}-{('float16', 'bfloat16')[i % 2]}-normal" for i, n in enumerate(SIZES)]
PRODUCTS += [f"wgmma-parts-{n}-normal" for n in PARTS_SIZES]
PRODUCTS += ["mma-1-float16-normal", "mma-2-bfloat16-normal", "mma-turing-normal"]
PRODUCTS += [f"mma-tf32-{form}-normal" for form in TF32_FORMS]
SMALL = [name for name in NAMES if "mma-" not in name]
# With two products of a warpgroup and two of a warp.
FEW = [*SMALL, PRODUCTS[0], "wgmma-parts-64-integers"]
FEW += ["mma-2-bfloat16-normal", "mma-tf32-wide-2-normal"]


def operands(case):
    return case.operands(np.random.default_rng(2))


def results(case, arguments):
    """The arrays that a run leaves its results in, by number of the argument."""
    return {i: getattr(arguments[i], "array", arguments[i]) for i in case.agree}


def simulated(case):
    arguments = operands(case)
    simulate.launch(case.kernel, case.grid, arguments)
    return results(case, arguments)


@cache
def unbroken(name):
    return simulated(cases()[name])


def disagreements(case, got, expected):
    """A line for each array in which `got` is not what it should be."""
    for i, agree in case.agree.items():
        same = agree(got[i], expected[i])
        assert same.shape == expected[i].shape
        if not same.all():
            at = tuple(int(x) for x in np.argwhere(~same)[0])
            yield (
                f"argument {i}: {np.sum(~same)} of {same.size} differ, first at {at}: "
                f"{got[i][at]!r} should be {expected[i][at]!r}"
            )


# --- without a GPU --------------------------------------------------------------------------------


def test_no_instruction_is_left_out():
    """Each instruction, and one of each factory, is in a kernel that runs on the GPU."""
    used = {name_of(x) for case in cases().values() for x in used_by(case.kernel.function)}
    assert used == instructions()
    assert len(used) > 30


# Hints, a pause, a budget that a simulated kernel cannot exceed: without effect on any result.
SILENT = {
    "barrier.fence_mbarrier_init",
    "barrier.setmaxnreg_inc",
    "memory.fence_proxy_async_global",
    "thread.nanosleep",
    "tma.fence_proxy_tensormap",
}


def uses():
    """(case, number of an instruction in it), with names."""
    for name in FEW:
        for i, x in enumerate(used_by(cases()[name].kernel.function)):
            short = name_of(x).removeprefix("flashnumba.ptx.")
            if short not in SILENT:
                yield pytest.param(name, i, id=f"{name}-{i}-{short}")


@pytest.mark.parametrize("name, number", list(uses()))
def test_every_instruction_matters(name, number, monkeypatch):
    """Without it, or with 0 for its result, the simulated kernel fails or gives another result.

    So the comparison on the GPU cannot miss an instruction that does nothing there.
    """
    case, expected = cases()[name], unbroken(name)
    instruction = used_by(case.kernel.function)[number]
    assert not list(disagreements(case, expected, expected))
    monkeypatch.setattr(instruction, "simulated", lambda *operands: np.uint32(0))
    try:
        got = simulated(case)
    except (simulate.SimulatorError, simulate.Deadlock):
        return
    assert list(disagreements(case, got, expected))


# Volta and later: an instruction is 16 bytes, and its lowest 9 bits are the operation.
OPERATIONS = {
    0x009: "FMNMX",
    0x03B: "LDSM",
    0x03C: "HMMA",
    0x03E: "F2FP",
    0x044: "STSM",
    0x108: "MUFU",
    0x11A: "DEPBAR",
    0x11D: "BAR",
    0x181: "LDG",
    0x184: "LDS",
    0x186: "STG",
    0x188: "STS",
    0x18E: "RED",  # before Hopper
    0x1A6: "RED",
    0x1A7: "SYNCS",
    0x1AE: "LDGSTS",
    0x1AF: "LDGDEPBAR",
    0x1B2: "SYNCS.EXCH",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B7: "UTMACMDFLUSH",
    0x1B9: "UTMACCTL",
    0x1BA: "UBLKCP",
    0x1BB: "UBLKRED",
    0x1C5: "WARPGROUP",
    0x1C6: "FENCE",
    0x1C8: "USETMAXREG",
    0x1F0: "HGMMA",
}


def operations(code):
    """How many of OPERATIONS a cubin holds, by name."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", code, 0x28)
    sections = [struct.unpack_from("<I4xQQQQ", code, offset + size * i) for i in range(count)]
    strings, found = sections[names][3], Counter()
    for name, _, _, start, length in sections:
        if code[strings + name :].startswith(b".text."):
            for word in np.frombuffer(code[start : start + length], "<u8")[::2].tolist():
                operation = OPERATIONS.get(word & 0x1FF)
                if operation == "WARPGROUP":
                    operation += ".DEPBAR" if word >> 47 & 1 else ".ARRIVE"
                found[operation] += 1
    return found


@needs_compilers
@pytest.mark.parametrize("name", [*SMALL, *PRODUCTS])
def test_kernels_compile_to_the_machines_instructions(name):
    """For sm_90a: no spills, no local memory, every operation there, HMMA as often as written.

    Products that ptxas serialises (an accumulator touched in flight, say) are waited for one by
    one: there must not be more waits than were written.
    """
    case = cases()[name]
    cubin = runtime.cached_cubin(case.kernel, (9, 0, "a"))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error|ignored", cubin.log), cubin.log
    assert cubin.registers * case.kernel.threads <= 65536
    found = operations(cubin.code)
    assert found >= Counter(case.machine), found
    assert found["HMMA"] == case.machine.get("HMMA", 0)
    if "HGMMA" in case.machine:
        waits, products = "WARPGROUP.DEPBAR", "HGMMA"
        assert found[waits] * case.machine[products] <= found[products] * case.machine[waits]


@needs_compilers
def test_the_log_tells_of_a_missing_fence():
    """ptxas adds it and says so in nvJitLink's log, up to 13.0; 13.5 was seen to add it silently.

    What matters, products waited for one by one, the check above counts in the machine code.
    """
    from cuda.bindings import nvjitlink

    if nvjitlink.version() > (13, 0):
        pytest.skip("this nvJitLink may not say that it adds a fence")
    kernel = ptx_cases.make_pipeline("wgmma fence").kernel
    assert "(C7519) warpgroup.arrive is injected" in runtime.compile_kernel(kernel, (9, 0, "a")).log


GENERAL = [name for name in [*SMALL, *PRODUCTS] if not cases()[name].hopper]
# sm_80 is the oldest that has bfloat16 and cp.async; these need no more than sm_75.
TURING = ("thread-turing", "shared", "rows", "red", "mma-turing-integers", "mma-turing-normal")
OLDER = [(name, (8, 0)) for name in GENERAL] + [(name, (7, 5)) for name in TURING]


@needs_compilers
@pytest.mark.parametrize("name, cc", OLDER)
def test_general_instructions_compile_for_ampere_and_turing(name, cc):
    """No spills, and the same operations of the machine as for sm_90a."""
    case = cases()[name]
    cubin = runtime.cached_cubin(case.kernel, cc)
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    found = operations(cubin.code)
    assert found >= Counter(case.machine), found
    assert found["HMMA"] == case.machine.get("HMMA", 0)


# --- on a GPU -------------------------------------------------------------------------------------


def machines():
    """Every case with its marks: most of them need a Hopper or an Ampere GPU."""
    for name, case in cases().items():
        marks = [pytest.mark.gpu]
        if name not in TURING:
            marks.append(pytest.mark.sm90 if case.hopper else pytest.mark.sm80)
        yield pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", list(machines()))
def test_the_machine_does_what_the_body_says(name):
    """Bit for bit, or to the error that the instruction states (ptx_cases.py)."""
    import cupy

    case = cases()[name]
    expected = simulated(case)
    arguments = [
        TensorMap(to_gpu(cupy, x.array), x.rows) if isinstance(x, TensorMap)
        else to_gpu(cupy, x) if isinstance(x, np.ndarray) else x
        for x in operands(case)
    ]  # fmt: skip
    runtime.launch(case.kernel, case.grid, arguments)
    got = {i: x.get() for i, x in results(case, arguments).items()}
    assert not (wrong := "\n".join(disagreements(case, got, expected))), wrong


def test_the_comparison_notices_one_bit():
    """Of every array that is compared exactly; and twice the error that is allowed elsewhere."""
    for name in FEW:
        case = cases()[name]
        expected = simulated(case)
        for i, agree in case.agree.items():
            got = {j: x.copy() for j, x in expected.items()}
            if agree is ptx_cases.exact:
                bits = got[i].view(f"u{got[i].itemsize}")
                bits[(-1,) * bits.ndim] ^= 1
            else:
                at = tuple(np.argwhere(np.isfinite(got[i]) & (np.abs(got[i]) > 1))[0])
                got[i][at] += 2.0**-8
            assert len(list(disagreements(case, got, expected))) == 1


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("form", [f for f, (*_, products) in TF32_FORMS.items() if products == 3])
def test_the_comparison_notices_a_missing_product(form, missing, monkeypatch):
    """That of the lower part of A or of B, in each of the results."""
    name = f"mma-tf32-{form}-normal"
    case, expected = cases()[name], unbroken(name)
    whole = mma_tf32.multiply_parts

    def multiply_parts(a, b, products):
        factors = [a, b]
        factors[missing] = mma_tf32.high_and_low(factors[missing])[0]
        return whole(*factors, products)

    monkeypatch.setattr(mma_tf32, "multiply_parts", multiply_parts)
    ((i, agree),) = case.agree.items()
    same = agree(simulated(case)[i], expected[i])
    assert not same.all(axis=(1, 2)).any()
