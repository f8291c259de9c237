"""ldmatrix and stmatrix: 8 x 8 matrices of 16 bits between shared memory and the lanes of a warp."""

import numpy as np

from .counting import Access
from .errors import PtxError
from .lanes import Lanes
from .source import Address, Instruction, Vector
from .values import Array, Bits, undefined_mask
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
            places = _places(mine, transposed)
            if loads:
                wave.put(register, lanes, _load(wave, lanes, places))
            else:
                _store(wave, lanes, places, wave.fetch(register, 32, lanes))

    return execute


def _places(rows: Array, transposed: bool) -> tuple[Array, Array]:
    """The addresses of both 16-bit numbers of each lane."""
    lane = np.arange(32)
    if transposed:
        low, high = ((2 * (lane % 4) + half, lane // 4) for half in (0, 1))
    else:
        low, high = ((lane // 4, 2 * (lane % 4) + half) for half in (0, 1))
    return (rows[:, low[0]] + 2 * low[1]).reshape(-1), (rows[:, high[0]] + 2 * high[1]).reshape(-1)


def _count(wave: Wave, lanes: Lanes, verb: str, rows: Array) -> None:
    warp = np.repeat(lanes.numbers[::32] >> 5, 8)
    wave.report.add_shared(Access(verb, 16), warp, np.tile(np.arange(8), len(rows)), rows.reshape(-1))


def _load(wave: Wave, lanes: Lanes, places: tuple[Array, Array]) -> Bits:
    value: Array = np.zeros((), np.uint32)
    undefined: Array = np.zeros((), np.uint8)
    for half, place in enumerate(places):
        got, spoiled = wave.shared.load(wave.block[lanes.numbers], place, 2, 1, wave.moment(lanes))
        value = value | got[:, 0].astype(np.uint32) << np.uint32(16 * half)
        if spoiled is not None:
            undefined = undefined | ((spoiled[:, 0] | spoiled[:, 1] << 1) << 2 * half).astype(np.uint8)
    return Bits(value, undefined if undefined.any() else None)


def _store(wave: Wave, lanes: Lanes, places: tuple[Array, Array], held: Bits) -> None:
    for half, place in enumerate(places):
        value = (lanes.spread(held.value) >> np.uint32(16 * half)).astype(np.uint16)[:, None]
        mask = lanes.spread(undefined_mask(held)) >> np.uint8(2 * half)
        spoiled = np.stack((mask & 1, mask >> 1 & 1), axis=1).astype(bool)
        undefined = spoiled if spoiled.any() else None
        wave.shared.store(wave.block[lanes.numbers], place, value, undefined, wave.moment(lanes))
