"""From an instruction to what executes it. What is not in a table is refused, with the reason where there is one."""

from functools import cache

import numpy as np

from . import accesses, comparisons, conversions, exchange, floats, integers, matrices, moves
from .errors import PtxError
from .lanes import Lanes
from .source import DECLARATION, Instruction, Vector
from .undefined import of_whole
from .values import Bits, Operation
from .wave import Executor, Wave

OPERATIONS: dict[str, Operation] = integers.TABLE | floats.TABLE | conversions.TABLE | comparisons.TABLE
_FAMILIES = {
    "mov": moves.decode_mov,
    "setp": moves.decode_setp,
    "ld": accesses.decode_load,
    "st": accesses.decode_store,
    "atom": accesses.decode_change,
    "red": accesses.decode_change,
    "createpolicy": accesses.decode_policy,
    "shfl": exchange.decode_shuffle,
    "redux": exchange.decode_reduction,
    "vote": exchange.decode_vote,
    "ldmatrix": matrices.decode_matrix,
    "stmatrix": matrices.decode_matrix,
}
_INEXACT = {"ftz", "approx", "full"}
_INEXACT_VERBS = {"ex2", "lg2", "sin", "cos", "tanh", "rsqrt"}
_FUSIBLE = {
    f"{verb}.{kind}"
    for verb in ("add", "sub", "mul")
    for kind in ("f32", "f64", "f32x2", "f16", "f16x2", "bf16", "bf16x2")
}


def decode(instruction: Instruction, allow_fma: bool) -> Executor:
    """What executes the instruction for some lanes."""
    try:
        return _decode(instruction, allow_fma)
    except PtxError as error:
        raise PtxError(f"{error}: {instruction.text}") from None


def _decode(instruction: Instruction, allow_fma: bool) -> Executor:
    verb = instruction.parts[0]
    if reason := inexact_reason(instruction.opcode):
        raise PtxError(reason)
    if instruction.opcode == DECLARATION:
        return moves.decode_declaration(instruction)
    if instruction.opcode in OPERATIONS:
        operation = OPERATIONS[instruction.opcode]
        if operation.fused and not allow_fma:
            raise PtxError("a fused multiply-add rounds once where the kernel may mean twice; allow_fma=True runs it")
        return _lane_by_lane(instruction, operation)
    if instruction.opcode == "bar.warp.sync":
        return exchange.decode_warp_barrier(instruction)
    if verb in _FAMILIES:
        return _FAMILIES[verb](instruction)
    raise PtxError(f"instruction {instruction.opcode} is not known")


@cache
def inexact_reason(opcode: str) -> str:
    """Why PTX leaves the result of an instruction open, or nothing."""
    verb, *modifiers = opcode.split(".")
    if verb in _INEXACT_VERBS or _INEXACT & set(modifiers):
        return "PTX leaves open what comes out to the last bit"
    if opcode in _FUSIBLE:
        return "without .rn, the assembler may fuse this with another instruction"
    return ""


def _lane_by_lane(instruction: Instruction, operation: Operation) -> Executor:
    to, *sources = instruction.operands
    if len(sources) == 2 and isinstance(sources[0], Vector):  # cvt.rs d, {a, b, e, f}, random
        sources = [*sources[0].items, sources[1]]
    widths, compute = operation.operands, operation.compute
    if instruction.opcode in floats.THREE_OPERANDS and len(sources) == 3:
        widths, compute = (32, 32, 32), lambda a, b, c: operation.compute(operation.compute(a, b), c)
    if len(sources) != len(widths):
        raise PtxError(f"{len(sources)} operands instead of {len(widths)}")
    rule = operation.undefined or of_whole(operation.result)

    def execute(wave: Wave, lanes: Lanes) -> None:
        held = tuple(
            wave.fetch(each, bits, lanes, any_width=operation.any_width)
            for each, bits in zip(sources, widths, strict=True)
        )
        undefined = None
        if any(each.undefined is not None for each in held):
            undefined = rule(held)
        value = np.asarray(compute(*(each.value for each in held)))
        wave.put(to, lanes, Bits(value, undefined), any_width=operation.any_width, sign_fills=operation.signed)

    return execute
