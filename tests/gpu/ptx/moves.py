"""mov: copies, pairs of registers packed into one and taken apart again. And setp, whose results are predicates."""

import numpy as np

from .comparisons import SETP
from .errors import PtxError
from .lanes import Lanes
from .source import Instruction, Operand, Pair, Register, Sink, Vector
from .values import Array, Bits, every_byte, undefined_mask, unsigned
from .wave import Executor, Wave

_TYPES = {"pred": 1} | {f"{kind}{bits}": bits for kind in "bus" for bits in (16, 32, 64)} | {"f32": 32, "f64": 64}


def decode_mov(instruction: Instruction) -> Executor:
    """mov.type d, a; mov.b32 d, {a, b}; mov.b32 {a, b}, d."""
    parts, operands = instruction.parts, instruction.operands
    if len(parts) != 2 or parts[1] not in _TYPES or len(operands) != 2:
        raise PtxError("this kind of mov is not known")
    bits, (to, source) = _TYPES[parts[1]], operands
    if isinstance(to, Vector):
        return _taken_apart(to.items, source, bits)
    if isinstance(source, Vector):
        return _packed(to, source.items, bits)
    return lambda wave, lanes: wave.put(to, lanes, wave.fetch(source, bits, lanes))


def _packed(to: Operand, items: tuple[Operand, ...], bits: int) -> Executor:
    each, rest = divmod(bits, len(items))
    if rest or len(items) not in (2, 4):
        raise PtxError(f"{len(items)} numbers do not fill {bits} bits")

    def execute(wave: Wave, lanes: Lanes) -> None:
        value: Array = np.zeros((), unsigned(bits))
        undefined: Array = np.zeros((), np.uint8)
        for place, item in enumerate(items):
            held = wave.fetch(item, each, lanes)
            value = value | held.value.astype(unsigned(bits)) << unsigned(bits)(each * place)
            undefined = undefined | undefined_mask(held) << np.uint8(each * place // 8)
        wave.put(to, lanes, Bits(value, undefined if undefined.any() else None))

    return execute


def _taken_apart(items: tuple[Operand, ...], source: Operand, bits: int) -> Executor:
    each, rest = divmod(bits, len(items))
    if rest or len(items) not in (2, 4):
        raise PtxError(f"{bits} bits are not {len(items)} numbers")

    def execute(wave: Wave, lanes: Lanes) -> None:
        held = wave.fetch(source, bits, lanes)
        for place, item in enumerate(items):
            value = (held.value >> unsigned(bits)(each * place)).astype(unsigned(each))
            undefined = undefined_mask(held) >> np.uint8(each * place // 8) & np.uint8(every_byte(each))
            wave.put(item, lanes, Bits(value, undefined if undefined.any() else None))

    return execute


def decode_declaration(instruction: Instruction) -> Executor:
    """Registers of inner braces are undefined where they are declared, also when a loop comes there again."""

    def execute(wave: Wave, lanes: Lanes) -> None:
        for each in instruction.operands:
            assert isinstance(each, Register)
            wave.undefine(each, lanes)

    return execute


def decode_setp(instruction: Instruction) -> Executor:
    """setp.verb.type p, a, b; a pair of numbers has two results, p|q, the lower one first."""
    comparison = SETP.get(instruction.opcode)
    if comparison is None or len(instruction.operands) != 3:
        raise PtxError("this comparison is not known")
    to, one, other = instruction.operands
    if comparison.pair != isinstance(to, Pair) or not isinstance(to, Pair | Register | Sink):
        raise PtxError("a pair of numbers needs a pair of predicates, and a number one")
    bits = comparison.bits * (2 if comparison.pair else 1)

    def execute(wave: Wave, lanes: Lanes) -> None:
        sources = [wave.fetch(each, bits, lanes) for each in (one, other)]
        undefined = undefined_mask(sources[0]) | undefined_mask(sources[1])
        if not isinstance(to, Pair):
            found = comparison.compute(*(each.value for each in sources))
            wave.put(to, lanes, Bits(np.asarray(found), undefined if undefined.any() else None))
            return
        for result, shift in ((to.first, 0), (to.second, 16)):
            halves = ((each.value >> np.uint32(shift)).astype(np.uint16) for each in sources)
            mine = undefined >> np.uint8(shift // 8) & np.uint8(0b11)
            wave.put(result, lanes, Bits(np.asarray(comparison.compute(*halves)), mine if mine.any() else None))

    return execute
