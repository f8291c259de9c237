"""Fused multiply-adds that add -0, and so are products: those of bf16 are written so for GPUs that have no others."""

from collections import Counter
from collections.abc import Iterator

from .registry import OPERATIONS
from .source import DECLARATION, Immediate, Instruction, Operand, Pair, Program, Register, Vector
from .wave import constant

_SIZES = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16}


def products(program: Program) -> frozenset[Instruction]:
    """Those of a program whose addend is -0 wherever they run: a constant, or a register that is set to one once."""
    others = [each for each in program.instructions if each.opcode != DECLARATION]
    written = Counter(register for each in others for register in _registers(each.operands[:1]))
    constants = {
        each.operands[0]: each.operands[1]
        for each in others
        if each.parts[0] == "mov" and each.guard is None and len(each.operands) == 2 and written[each.operands[0]] == 1
    }
    return frozenset(
        each
        for each in others
        if each.opcode in OPERATIONS
        and OPERATIONS[each.opcode].fused
        and _is_minus_zero(constants.get(each.operands[-1], each.operands[-1]), each)
    )


def _registers(operands: tuple[Operand, ...]) -> Iterator[Register]:
    """The registers among operands that may be results. Those of addresses are read."""
    for operand in operands:
        match operand:
            case Register():
                yield operand
            case Vector(items):
                yield from _registers(items)
            case Pair(first, second):
                yield from _registers((first, second))


def _is_minus_zero(operand: Operand, instruction: Instruction) -> bool:
    """Whether it is -0 in each half of a pair, or in the only number."""
    size, whole = _SIZES[instruction.parts[-1].removesuffix("x2")], OPERATIONS[instruction.opcode].result
    nothing = sum(1 << sign for sign in range(size - 1, whole, size))
    return isinstance(operand, Immediate) and int(constant(operand, whole)) == nothing
