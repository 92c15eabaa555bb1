"""From an encoding to a Numba intrinsic: the only file that touches llvmlite.

An instruction's operands are described by kinds, which are also its annotations:

    u32 i32 u64 f32       a register
    address               an array, of which the instruction gets the (generic) address
    reads(f32, 4)         the first 4 elements of a local array, as input registers
    writes(f32, 4)        the same, output only: old values are dead
    updates(f32, 4)       the same, input and output in one register ("tied")
    pins(f32, 4)          the same, unchanged: no use of them can move above the instruction

In the encoding `{name}` stands for an operand, `{d}` for the result; a fragment becomes
`{r0, r1, ...}`, `{name:4:8}` a slice of it and `{name:4}` one register. A local array that is only
used with constant indices and by these operands never exists in memory: it stays in registers.
"""

import inspect
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

VOID, I32 = ir.VoidType(), ir.IntType(32)


@dataclass(frozen=True)
class Kind:
    """A register: its Numba type, its LLVM type and its letter in LLVM's inline assembly."""

    numba: object
    llvm: object
    letter: str


f32 = Kind(types.float32, ir.FloatType(), "f")
i32 = Kind(types.int32, I32, "r")
u32 = Kind(types.uint32, I32, "r")
u64 = Kind(types.uint64, ir.IntType(64), "l")
address = Kind(None, ir.IntType(64), "l")


@dataclass(frozen=True)
class Fragment:
    """`size` elements of a local array as registers; `mode` is one of the four functions below."""

    kind: Kind
    size: int
    mode: str

    @property
    def is_output(self):
        return self.mode != "reads"


def reads(kind, size):
    return Fragment(kind, size, "reads")


def writes(kind, size):
    return Fragment(kind, size, "writes")


def updates(kind, size):
    return Fragment(kind, size, "updates")


def pins(kind, size):
    return Fragment(kind, size, "pins")


class Registers:
    """The operand numbers of a fragment, written into the encoding by str.format."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __format__(self, spec):
        if spec.isdigit():
            return f"${self.numbers[int(spec)]}"
        start, stop = (int(x) for x in spec.split(":")) if spec else (0, len(self.numbers))
        return "{" + ", ".join(f"${n}" for n in self.numbers[start:stop]) + "}"


def assemble(encoding, name, operands, result, pure):
    """A Numba intrinsic that emits `encoding`.

    Parameters
    ----------
    encoding : str
        PTX with the operands' names in braces; PTX's own braces doubled.
    name : str
    operands : dict of Kind or Fragment, by name
    result : Kind or None
        What `{d}` is.
    pure : bool
        Depends on its operands alone: may be moved, merged and dropped. Otherwise it stays in
        order with all other accesses to memory.
    """
    plan = Plan(encoding, operands, result, pure)

    def typed(typing_context, *arguments):
        kinds = operands.values()
        given = zip(kinds, arguments, strict=True)
        concrete = [getattr(kind, "numba", None) or t for kind, t in given]
        returns = types.void if result is None else result.numba
        return signature(returns, *concrete), plan.emit

    parameters = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY)
        for n in ("typing_context", *operands)
    ]
    typed.__signature__ = inspect.Signature(parameters)
    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


class Plan:
    """Which operand of the assembly is which argument: outputs first, as LLVM wants them."""

    def __init__(self, encoding, operands, result, pure):
        self.operands, self.result, self.pure = operands, result, pure
        self.outputs = [] if result is None else [result]
        text = {"d": "$0"}
        for name, operand in operands.items():
            if isinstance(operand, Fragment) and operand.is_output:
                text[name] = self.registers(len(self.outputs), operand)
                self.outputs += [operand.kind] * operand.size
        letters = [f"={kind.letter}" for kind in self.outputs]
        for name, operand in operands.items():
            if isinstance(operand, Kind):
                text[name] = f"${len(letters)}"
                letters.append(operand.letter)
            elif operand.mode == "reads":
                text[name] = self.registers(len(letters), operand)
                letters += [operand.kind.letter] * operand.size
            elif operand.mode != "writes":
                letters += [str(n) for n in text[name].numbers]
        self.text = encoding.format(**text)
        self.letters = ",".join(letters + ["~{memory}"] * (not pure))

    @staticmethod
    def registers(first, operand):
        return Registers(range(first, first + operand.size))

    def emit(self, context, builder, sig, arguments):
        """Generate one use of the instruction."""
        inputs, stores = [], []
        for operand, kind, value in zip(self.operands.values(), sig.args, arguments, strict=True):
            if operand is address:
                inputs.append(pointer(context, builder, kind, value))
            elif isinstance(operand, Kind):
                inputs.append(value)
            else:
                elements = self.elements(context, builder, operand, kind, value)
                stores += elements if operand.is_output else []
                inputs += [builder.load(e) for e in elements] if operand.mode != "writes" else []
        kinds = [kind.llvm for kind in self.outputs]
        returns = {0: VOID, 1: kinds and kinds[0]}.get(len(kinds), ir.LiteralStructType(kinds))
        function = ir.FunctionType(returns, [x.type for x in inputs])
        code = ir.InlineAsm(function, self.text, self.letters, side_effect=not self.pure)
        got = builder.call(code, inputs)
        values = [builder.extract_value(got, i) for i in range(len(kinds))] if kinds[1:] else [got]
        first = values.pop(0) if self.result is not None else context.get_dummy_value()
        for element, value in zip(stores, values, strict=bool(kinds)):
            builder.store(value, element)
        return first

    @staticmethod
    def elements(context, builder, operand, kind, value):
        """Pointers to the elements of a local array."""
        data = context.make_array(kind)(context, builder, value).data
        data = builder.bitcast(data, operand.kind.llvm.as_pointer())
        return [builder.gep(data, [ir.Constant(I32, i)]) for i in range(operand.size)]


def pointer(context, builder, kind, value):
    """The address of an array's first element."""
    data = context.make_array(kind)(context, builder, value).data
    return builder.ptrtoint(data, address.llvm)
