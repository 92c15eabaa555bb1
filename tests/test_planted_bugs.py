"""Bugs planted in the Hopper kernels are found without a GPU.

Each replaces one line of a kernel, or of what it calls, and runs it in the simulator: it reads what
has not arrived, waits for ever, or is wrong.
"""

import sys
from types import ModuleType

import numpy as np
import pytest
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import reference, simulate
from flashnumba.device import fragment
from flashnumba.kernels import backward_block, backward_wgmma, forward_wgmma

WAITS = "wait_kv(smem, K_FULL, n_next)\n        wait_kv(smem, V_READY, n)\n"
ISSUE = "issue_pv(smem, n, acc, p)\n\n"
LOOP = "while n_block > begin:\n                n_block, next_n"
SEEN = "full_begin <= n_block < full_end"
NOTHING = "pass\n"
LINES = {
    "no wait for K": (WAITS, "wait_kv(smem, V_READY, n)\n"),
    "no wait for V": (WAITS, "wait_kv(smem, K_FULL, n_next)\n"),
    "no wait for Q": ("wait_q(smem, Q_FULL, turn)\n", NOTHING),
    "no wait for acc": ("wait_acc(acc)\n", NOTHING),
    "no wait for the store before": ("wait_stores()\n", NOTHING),
    "no fence before the store": ("fence_proxy_async()\n", NOTHING),
    "V given back too early": (ISSUE, ISSUE + "        give_back(smem, V_EMPTY, n)\n\n"),
    "K not given back": ("give_back(smem, K_EMPTY, n)\n        if n_block", "if n_block"),
    "Q not given back": ("arrive_q(smem, Q_EMPTY, turn)\n", NOTHING),
    "a work not given back": ("arrive_work(smem, WORK_EMPTY, turn)  # by", "pass  #"),
    "acc not rescaled": ("rescale(acc, a)\n", NOTHING),
    "acc not cleared": ("zero_acc(acc)\n\n", "pass\n\n"),
    "m kept for the next rows": ("m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO\n", "l[r] = ZERO\n"),
    "one tile too few masked": (SEEN, SEEN.replace("< full_end", "<= full_end")),
    "last tile forgotten": (LOOP, LOOP.replace("begin", "begin + 1")),
}


S_MASK = "hide(s, smem, warp, m_block, window)"
DS_THERE = "arrive_ds(smem, DS_FULL, n)"
TURN = "st_release_u32(turns[b, head], u32(m_block), u32(n_block + 1))\n"
DQ = "gemm_dq(dq, descriptor(DS_MN, ds_tile), descriptor(KV_MN, k_columns))"
OF_BACKWARD = {
    "no wait for Q": ("wait_q(smem, Q_READY, n)\n", NOTHING),
    "no wait for dO": ("wait_q(smem, DO_READY, n)\n", NOTHING),
    "no wait for s": ("wait_s(s)\n", NOTHING),
    "no wait for dq": ("wait_dq(dq)\n", NOTHING),
    "no fence before ds is read": ("fence_proxy_async()\n        " + DS_THERE, DS_THERE),
    "ds read before all of it is there": ("wait_ds(smem, DS_FULL, n)\n", NOTHING),
    "one buffer for ds": ("n % DS_SLOTS * DS_BYTES", "u32(0)"),
    "dq of the same tile": ("before if LAGGING else n", "n"),
    "turn not passed on": (TURN, NOTHING),
    "dO given back too early": ("wait_s(dp)\n", "arrive_q(smem, DO_EMPTY, n)\n"),
    "Q not given back": ("arrive_q(smem, Q_EMPTY, n)\n", NOTHING),
    "dk written before its last tile": ("wait_acc(dk_acc)\n", NOTHING),
    "p not masked": (S_MASK, "pass"),
    "dk not scaled": ("dk_acc[i] *= scale\n", NOTHING),
    "dv not cleared": ("zero_acc(dv_acc)\n", NOTHING),
    "K replaced too early": (
        "wait_one_before(smem, KV_EMPTY, turn)\n            describe",
        "describe",
    ),
    "dv where ds is still read": ("wait_one(smem, KV_EMPTY, turn)\n", NOTHING),
    "ds where dv still leaves from": ("wait_stores()  # of the work before", "pass  # "),
    "the next work's tiles counted from 0": ("n = consume_tiles(", "consume_tiles("),
    "k of the other columns": (DQ, DQ.replace("k_columns", "smem")),
}


def example():
    """Two heads of more rows than a block has, keys in more tiles than shared memory has room for.

    The scores of the last tile are far above those before.
    """
    rng = np.random.default_rng(0)
    do, q, k, v = (rng.standard_normal((1, 300, 2, 128)).astype(np.float16) for _ in range(4))
    k[:, :100] *= 8
    return do, q, k, v


def check_forward(make_forward, monkeypatch):
    """In the usual order of threads, and in two others, in which TMA keeps no order either."""
    monkeypatch.setattr(forward_wgmma, "make_forward", make_forward)
    _, q, k, v = example()
    exact, exact_lse = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    low, _ = reference.low_precision(q, k, v, causal=True)
    for seed in (None, 1, 2):
        with simulate.shuffled(seed):
            o, lse = fn.attention(q, k, v, causal=True, return_lse=True, backend="simulator-wgmma")
        assert_within_rule(o, exact, low, np.float16)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def check_backward(make_backward, monkeypatch):
    monkeypatch.setattr(backward_wgmma, "make_backward", make_backward)
    given = example()
    exact = reference.attention_backward(*(x.astype(np.float64) for x in given), causal=True)
    low = reference.low_precision_backward(*given, causal=True)
    o, lse = fn.attention(*given[1:], causal=True, return_lse=True, backend="numpy")
    options = {"causal": True, "deterministic": True, "backend": "simulator-wgmma"}
    for seed in (None, 1, 2):
        with simulate.shuffled(seed):
            got = fn.attention_backward(*given, o, lse, **options)
        for name, *grads in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
            assert_within_rule(*grads, np.float16, name)


def broken(monkeypatch, old, new, *modules):
    """The last module, from sources with a line replaced wherever it stands.

    It imports from the modules before it, which are replaced as well.
    """
    found = False
    for module in modules:
        with open(module.__file__) as file:
            source = file.read()
        found |= old in source
        other = ModuleType(module.__name__)
        exec(compile(source.replace(old, new), module.__file__, "exec"), other.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, other)
    assert found
    return other


FOUND = (simulate.SimulatorError, simulate.Deadlock, AssertionError)


def test_the_forward_without_a_bug(monkeypatch):
    check_forward(forward_wgmma.make_forward, monkeypatch)


def test_the_backward_without_a_bug(monkeypatch):
    check_backward(backward_wgmma.make_backward, monkeypatch)


@pytest.mark.parametrize("bug", LINES)
def test_a_bug_in_the_forward_is_found(bug, monkeypatch):
    module = broken(monkeypatch, *LINES[bug], forward_wgmma)
    with pytest.raises(FOUND):
        check_forward(module.make_forward, monkeypatch)


@pytest.mark.parametrize("bug", OF_BACKWARD)
def test_a_bug_in_the_backward_is_found(bug, monkeypatch):
    module = broken(monkeypatch, *OF_BACKWARD[bug], backward_block, backward_wgmma)
    with pytest.raises(FOUND):
        check_backward(module.make_backward, monkeypatch)


def test_a_wrong_swizzle_is_found(monkeypatch):
    """O is written 16 bytes beside its place."""
    right = fragment.swizzle128
    monkeypatch.setattr(fragment, "swizzle128", lambda at: right(at) ^ 16)
    fragment.output.cache_clear()
    try:
        with pytest.raises(FOUND):
            module = broken(monkeypatch, "o and lse.", "o and lse.", forward_wgmma)
            check_forward(module.make_forward, monkeypatch)
    finally:
        fragment.output.cache_clear()
