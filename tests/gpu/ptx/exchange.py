"""How the lanes of a warp exchange numbers: shfl, redux, vote. All lanes that the mask names must come."""

from collections.abc import Callable

import numpy as np

from .errors import PtxError
from .floats import extreme
from .lanes import Lanes
from .source import Instruction, Operand, Pair, Sink
from .values import Array, Bits, every_byte, of_type
from .wave import Executor, Wave

_REPEATABLE: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
_VERBS: dict[str, np.ufunc] = _REPEATABLE | {"add": np.add, "xor": np.bitwise_xor}
_TYPES = dict.fromkeys(("add", "min", "max"), ("s32", "u32")) | dict.fromkeys(("and", "or", "xor"), ("b32",))


def decode_shuffle(instruction: Instruction) -> Executor:
    """shfl.sync.mode.b32 d, a, b, c, mask; or d|p, where p says whether the number comes from the lane asked for."""
    parts, operands = instruction.parts, instruction.operands
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in _SOURCES or parts[3] != "b32" or len(operands) != 5:
        raise PtxError("this shuffle is not known")
    to, inside = (operands[0].first, operands[0].second) if isinstance(operands[0], Pair) else (operands[0], Sink())
    source_of = _SOURCES[parts[2]]
    source, lane_operand, clamp, mask = operands[1:]

    def execute(wave: Wave, lanes: Lanes) -> None:
        there = _members(wave, lanes, mask)
        held = wave.fetch(source, 32, lanes)
        lane = lanes.numbers & 31
        b, c = (_defined(wave, each, lanes).astype(np.int64) for each in (lane_operand, clamp))
        wanted, within = source_of(lane, b & 31, c & 31, c >> 8 & 31)
        wanted = np.where(within, wanted, lane)
        if (there >> wanted & 1 == 0).any():
            raise PtxError("a lane shuffles from one that is not in its mask")
        # From the lane's place in the wave to its place among those that are here.
        place = np.searchsorted(lanes.numbers, (lanes.numbers & ~np.int64(31)) + wanted)
        undefined = None if held.undefined is None else lanes.spread(held.undefined)[place]
        wave.put(to, lanes, Bits(lanes.spread(held.value)[place], undefined))
        wave.put(inside, lanes, Bits(np.asarray(within)))

    return execute


def _up(lane: Array, b: Array, c: Array, segment: Array) -> tuple[Array, Array]:
    return lane - b, lane - b >= _last(lane, c, segment)


def _down(lane: Array, b: Array, c: Array, segment: Array) -> tuple[Array, Array]:
    return lane + b, lane + b <= _last(lane, c, segment)


def _butterfly(lane: Array, b: Array, c: Array, segment: Array) -> tuple[Array, Array]:
    return lane ^ b, (lane ^ b) <= _last(lane, c, segment)


def _index(lane: Array, b: Array, c: Array, segment: Array) -> tuple[Array, Array]:
    wanted = (lane & segment) | (b & ~segment)
    return wanted, wanted <= _last(lane, c, segment)


def _last(lane: Array, c: Array, segment: Array) -> Array:
    """The last lane of the segment, for ``up`` the first."""
    return (lane & segment) | (c & ~segment)


_SOURCES: dict[str, Callable[[Array, Array, Array, Array], tuple[Array, Array]]] = {
    "up": _up, "down": _down, "bfly": _butterfly, "idx": _index,
}  # fmt: skip


def decode_reduction(instruction: Instruction) -> Executor:
    """redux.sync.verb.type d, a, mask: of all lanes in the mask, which must be the same for all of them."""
    parts = instruction.parts
    if len(instruction.operands) != 3 or len(parts) < 4 or parts[1] != "sync" or parts[2] not in _VERBS:
        raise PtxError("this reduction is not known")
    combine = _combination(parts[2], parts[3:])
    to, source, mask = instruction.operands

    def execute(wave: Wave, lanes: Lanes) -> None:
        there = _members(wave, lanes, mask)
        held = wave.fetch(source, 32, lanes)
        _, first, group = np.unique((lanes.numbers >> 5) << 32 | there, return_index=True, return_inverse=True)
        value = lanes.spread(held.value)
        # One row for each group; where a lane is missing stands what changes nothing.
        rows = np.zeros((len(first), 32), np.uint32)
        if parts[2] in _REPEATABLE:
            rows[:] = value[first][:, None]
        rows[group, lanes.numbers & 31] = value
        while rows.shape[1] > 1:
            rows = combine(rows[:, ::2], rows[:, 1::2])
        undefined = None
        if held.undefined is not None:
            spoiled = np.zeros(len(first), np.uint8)
            np.bitwise_or.at(spoiled, group, lanes.spread(held.undefined))
            undefined = np.where(spoiled, every_byte(32), 0).astype(np.uint8)[group]
        wave.put(to, lanes, Bits(rows[group, 0], undefined))

    return execute


def _combination(verb: str, modifiers: tuple[str, ...]) -> Callable[[Array, Array], Array]:
    """Two raw numbers to one."""
    *flags, kind = modifiers
    if kind in _TYPES[verb] and not flags:
        dtype = of_type(kind)
        ufunc = _VERBS[verb]
        return lambda a, b: ufunc(a.view(dtype), b.view(dtype)).view(np.uint32)
    if verb not in ("min", "max") or kind != "f32" or flags not in ([], ["abs"], ["NaN"], ["abs", "NaN"]):
        raise PtxError("this reduction is not known")
    better = extreme(verb, lambda a: a.view(np.float32), 32, "NaN" in flags)
    kept = np.uint32(0x7FFFFFFF if "abs" in flags else 0xFFFFFFFF)
    return lambda a, b: better(np.ascontiguousarray(a & kept), np.ascontiguousarray(b & kept))


def decode_vote(instruction: Instruction) -> Executor:
    """vote.sync.any|all|uni.pred p, a, mask, and vote.sync.ballot.b32 d, a, mask."""
    known = {f"vote.sync.{mode}.pred" for mode in ("any", "all", "uni")} | {"vote.sync.ballot.b32"}
    if instruction.opcode not in known or len(instruction.operands) != 3:
        raise PtxError("this vote is not known")
    mode = instruction.parts[2]
    to, source, mask = instruction.operands

    def execute(wave: Wave, lanes: Lanes) -> None:
        there = _members(wave, lanes, mask)
        held = lanes.spread(_defined(wave, source, lanes, 1))
        ballots = np.zeros(wave.total >> 5, np.int64)
        np.bitwise_or.at(ballots, lanes.numbers >> 5, held.astype(np.int64) << (lanes.numbers & 31))
        mine = ballots[lanes.numbers >> 5] & there
        if mode == "ballot":
            wave.put(to, lanes, Bits(mine.astype(np.uint32)))
        else:
            every, some = mine == there, mine != 0
            wave.put(to, lanes, Bits({"any": some, "all": every, "uni": every | ~some}[mode]))

    return execute


def decode_warp_barrier(instruction: Instruction) -> Executor:
    """bar.warp.sync mask: all lanes of a warp meet; a part of a warp cannot."""
    if instruction.opcode != "bar.warp.sync" or len(instruction.operands) != 1:
        raise PtxError("this barrier is not known")

    def execute(wave: Wave, lanes: Lanes) -> None:
        if (_members(wave, lanes, instruction.operands[0]) != 0xFFFFFFFF).any():
            raise PtxError("a barrier of a part of a warp is not known")
        wave.pass_warp_barrier(lanes)

    return execute


def _members(wave: Wave, lanes: Lanes, mask: Operand) -> Array:
    """The mask of each lane, all of whose members are here, and itself among them."""
    named = lanes.spread(_defined(wave, mask, lanes)).astype(np.int64)
    here = np.zeros(wave.total >> 5, np.int64)
    np.bitwise_or.at(here, lanes.numbers >> 5, np.int64(1) << (lanes.numbers & 31))
    if (named & ~here[lanes.numbers >> 5]).any():
        raise PtxError("the mask names lanes that are not here")
    if (named >> (lanes.numbers & 31) & 1 == 0).any():
        raise PtxError("a lane is not in its own mask")
    return named


def _defined(wave: Wave, operand: Operand, lanes: Lanes, bits: int = 32) -> Array:
    held = wave.fetch(operand, bits, lanes)
    if held.undefined is not None:
        raise PtxError("an undefined value decides which lanes exchange")
    return held.value
