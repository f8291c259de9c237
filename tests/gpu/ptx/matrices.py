"""ldmatrix and stmatrix: 8 x 8 matrices of 16 bits between shared memory and the lanes of a warp."""

from typing import NamedTuple

import numpy as np

from .counting import Access
from .errors import PtxError
from .lanes import Lanes
from .source import Address, Instruction, Vector
from .values import Array, Bits, unsigned
from .wave import Executor, Wave

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def decode_matrix(instruction: Instruction) -> Executor:
    """Lanes 8 i to 8 i + 7 say where the rows of matrix i lie; each lane holds two neighbours of each matrix."""
    parts = list(instruction.parts)
    transposed = "trans" in parts
    if transposed:
        parts.remove("trans")
    loads = parts[0] == "ldmatrix"
    known = len(parts) == 7 and parts[1:4] == ["sync", "aligned", "m8n8"] and parts[4] in _COUNTS
    if not known or parts[5] not in ("shared", "shared::cta") or parts[6] != "b16" or len(instruction.operands) != 2:
        raise PtxError("this kind of matrix is not known")
    registers, where = instruction.operands if loads else instruction.operands[::-1]
    if not isinstance(registers, Vector) or not isinstance(where, Address) or len(registers.items) != _COUNTS[parts[4]]:
        raise PtxError("this kind of matrix is not known")

    def execute(wave: Wave, lanes: Lanes) -> None:
        if lanes.count != lanes.warps * 32:
            raise PtxError("all lanes of a warp must come")
        base = wave.fetch(where.base, 32, lanes)
        if base.undefined is not None:
            raise PtxError("the address is undefined")
        rows = (lanes.spread(base.value).astype(np.int64) + where.offset).reshape(-1, 32)
        for number, register in enumerate(registers.items):
            mine = rows[:, 8 * number : 8 * number + 8]
            if (mine % 16).any():
                raise PtxError("misaligned access: a row of a matrix lies at a multiple of 16 bytes")
            _count(wave, lanes, parts[0], mine)
            parts_of_lane = _parts(mine, transposed)
            if loads:
                wave.put(register, lanes, _load(wave, lanes, parts_of_lane))
            else:
                _store(wave, lanes, parts_of_lane, wave.fetch(register, 32, lanes))

    return execute


class _Part(NamedTuple):
    """Bytes of a lane's register and where they lie in shared memory."""

    first: int
    size: int
    address: Array


def _parts(rows: Array, transposed: bool) -> list[_Part]:
    """A lane has two neighbours of a row; transposed, they are in rows one below the other."""
    lane = np.arange(32)
    if not transposed:
        return [_Part(0, 4, (rows[:, lane // 4] + lane % 4 * 4).reshape(-1))]
    return [_Part(2 * half, 2, (rows[:, lane % 4 * 2 + half] + lane // 4 * 2).reshape(-1)) for half in (0, 1)]


def _count(wave: Wave, lanes: Lanes, verb: str, rows: Array) -> None:
    warp = np.repeat(lanes.numbers[::32] >> 5, 8)
    wave.report.add_shared(Access(verb, 16), warp, np.tile(np.arange(8), len(rows)), rows.reshape(-1))


def _load(wave: Wave, lanes: Lanes, parts: list[_Part]) -> Bits:
    value: Array = np.zeros((), np.uint32)
    undefined: Array = np.zeros((), np.uint8)
    for part in parts:
        got, spoiled = wave.shared.load(wave.block[lanes.numbers], part.address, part.size, 1, wave.moment(lanes))
        value = value | got[:, 0].astype(np.uint32) << np.uint32(8 * part.first)
        if spoiled is not None:
            undefined = undefined | np.packbits(spoiled, axis=1, bitorder="little")[:, 0] << np.uint8(part.first)
    return Bits(value, undefined if undefined.any() else None)


def _store(wave: Wave, lanes: Lanes, parts: list[_Part], held: Bits) -> None:
    for part in parts:
        value = (lanes.spread(held.value) >> np.uint32(8 * part.first)).astype(unsigned(8 * part.size))[:, None]
        spoiled = None
        if held.undefined is not None:
            mask = lanes.spread(held.undefined) >> np.uint8(part.first)
            spoiled = np.unpackbits(mask[:, None], axis=1, bitorder="little")[:, : part.size].astype(bool)
        wave.shared.store(wave.block[lanes.numbers], part.address, value, spoiled, wave.moment(lanes))
