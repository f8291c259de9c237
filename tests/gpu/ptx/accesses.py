"""ld, st, atom and red: reading the modifiers strictly, then global memory, shared memory or parameters."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .counting import Access
from .errors import PtxError
from .lanes import Lanes
from .source import Address, Instruction, Operand, Register, Symbol, Vector
from .values import Array, Bits, every_byte, of_type, signed, undefined_mask, unsigned
from .wave import Executor, Wave

_SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "param"}
_CACHES = {"ld": {"ca", "cg", "cs", "lu", "cv"}, "st": {"wb", "cg", "cs", "wt"}}
_EVICTIONS = {f"L1::{how}" for how in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")}
_PREFETCHES = {"L2::64B", "L2::128B", "L2::256B"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_CHANGES: dict[str, tuple[np.ufunc, tuple[str, ...]]] = {
    "add": (np.add, ("s32", "u32", "u64")),
    "min": (np.minimum, ("s32", "u32", "s64", "u64")),
    "max": (np.maximum, ("s32", "u32", "s64", "u64")),
    "and": (np.bitwise_and, ("b32", "b64")),
    "or": (np.bitwise_or, ("b32", "b64")),
    "xor": (np.bitwise_xor, ("b32", "b64")),
}
_ORDERS = {"relaxed", "acquire", "release", "acq_rel"}


class _Modifiers:
    """Takes modifiers from the left; what nobody takes is not known."""

    def __init__(self, instruction: Instruction) -> None:
        self._left = list(instruction.parts[1:])

    def one_of(self, known: Any) -> str | None:
        """The next one, if it is known."""
        return self._left.pop(0) if self._left and self._left[0] in known else None

    def done(self) -> None:
        """Nothing may be left."""
        if self._left:
            raise PtxError(f"modifier .{self._left[0]} is not known here")


@dataclass(frozen=True)
class _Place:
    """What the modifiers and the address of an access say."""

    verb: str
    space: str
    type: str
    count: int
    address: Address

    @property
    def size(self) -> int:
        return int(self.type[1:]) // 8

    @property
    def access(self) -> Access:
        return Access(self.verb, self.size * self.count)

    def addresses(self, wave: Wave, lanes: Lanes) -> Array:
        """One for each lane."""
        bits = 64 if self.space == "global" else 32
        base = wave.fetch(self.address.base, bits, lanes)
        if base.undefined is not None:
            raise PtxError("the address is undefined")
        return lanes.spread(base.value).astype(np.int64) + self.address.offset


def decode_load(instruction: Instruction) -> Executor:
    """ld from parameters, global or shared memory."""
    place, operands = _place(instruction, "ld")
    (to, _), *_ = (operands[:2],)
    if place.space == "param":
        return _parameter(place, to)
    registers = _registers(to, place.count)

    def execute(wave: Wave, lanes: Lanes) -> None:
        address = place.addresses(wave, lanes)
        now = wave.moment(lanes)
        undefined = None
        if place.space == "global":
            wave.report.add_global(place.access, now.thread - 1 >> 5, address)
            value = wave.memory.load(address, place.size, place.count, now)
        else:
            wave.report.add_shared(place.access, wave.warp[lanes.numbers], lanes.numbers & 31, address)
            value, undefined = wave.shared.load(wave.block[lanes.numbers], address, place.size, place.count, now)
        for number, register in enumerate(registers):
            wave.put(register, lanes, _extended(value[:, number], place, undefined, number, register), any_width=True)

    return execute


def decode_store(instruction: Instruction) -> Executor:
    """st to global or shared memory."""
    place, operands = _place(instruction, "st")
    registers = _registers(operands[1], place.count)

    def execute(wave: Wave, lanes: Lanes) -> None:
        address = place.addresses(wave, lanes)
        now = wave.moment(lanes)
        held = [wave.fetch(each, place.size * 8, lanes, any_width=True) for each in registers]
        value = np.stack([lanes.spread(each.value) for each in held], axis=1)
        undefined = _bytes_of([lanes.spread(undefined_mask(each)) for each in held], place.size)
        if place.space == "global":
            if undefined is not None:
                raise PtxError("an undefined value is stored")
            wave.report.add_global(place.access, now.thread - 1 >> 5, address)
            wave.memory.store(address, value, now)
        else:
            wave.report.add_shared(place.access, wave.warp[lanes.numbers], lanes.numbers & 31, address)
            wave.shared.store(wave.block[lanes.numbers], address, value, undefined, now)

    return execute


def decode_change(instruction: Instruction) -> Executor:
    """atom and red on integers in global memory.

    What was there before depends on the order of threads, which is open: what atom returns is undefined.
    """
    verb = instruction.parts[0]
    modifiers = _Modifiers(instruction)
    if modifiers.one_of(("global",)) is None:
        raise PtxError("atomics are known in global memory alone, and .global must be said")
    scope = modifiers.one_of(("gpu", "sys", "cta"))
    order = modifiers.one_of(_ORDERS)
    if scope is None or order is None:
        raise PtxError("scope and order must be said")
    change = modifiers.one_of(_CHANGES)
    if change is None:
        raise PtxError("this atomic is not known: its result may depend on the order of threads")
    ufunc, types = _CHANGES[change]
    kind = modifiers.one_of(types)
    if kind is None:
        raise PtxError(
            f"an atomic {change} is known of {', '.join(types)}; that of floats depends on the order of threads"
        )
    modifiers.done()
    operands = instruction.operands
    to = operands[0] if verb == "atom" else None
    if len(operands) != (3 if verb == "atom" else 2) or not isinstance(operands[-2], Address):
        raise PtxError("this atomic is not known")
    place = _Place(verb, "global", kind, 1, operands[-2])
    (source,) = _registers(operands[-1], 1)

    def execute(wave: Wave, lanes: Lanes) -> None:
        address = place.addresses(wave, lanes)
        now = wave.moment(lanes)
        held = wave.fetch(source, place.size * 8, lanes)
        if held.undefined is not None:
            raise PtxError("an undefined value is stored")
        wave.report.add_global(place.access, now.thread - 1 >> 5, address)
        value = wave.memory.change(address, lanes.spread(held.value), of_type(place.type), ufunc, now)
        if to is not None:
            wave.put(to, lanes, Bits(value, np.asarray(every_byte(place.size * 8), np.uint8)))

    return execute


def _place(instruction: Instruction, verb: str) -> tuple[_Place, tuple[Operand, ...]]:
    modifiers = _Modifiers(instruction)
    space = modifiers.one_of(_SPACES)
    if space is None:
        raise PtxError(f"the state space of {verb} must be said: global, shared or param")
    modifiers.one_of(_CACHES[verb])
    modifiers.one_of(_EVICTIONS)
    policy = modifiers.one_of(("L2::cache_hint",))
    modifiers.one_of(_PREFETCHES if verb == "ld" else ())
    vector = modifiers.one_of(_VECTORS)
    kind = modifiers.one_of({f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)} | {"f32", "f64"})
    modifiers.done()
    operands = instruction.operands
    where = operands[1 if verb == "ld" else 0] if len(operands) == (3 if policy else 2) else None
    if kind is None or not isinstance(where, Address):
        raise PtxError(f"this kind of {verb} is not known")
    if policy and not (isinstance(operands[2], Register) and operands[2].bits == 64):
        raise PtxError("the cache policy must be a register of 64 bits")
    place = _Place(verb, _SPACES[space], kind, _VECTORS[vector] if vector else 1, where)
    if place.space == "param" and (verb == "st" or vector or policy):
        raise PtxError("parameters are read one by one")
    return place, operands


def _registers(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {count} numbers")
    return items


def _parameter(place: _Place, to: Operand) -> Executor:
    base = place.address.base
    if not isinstance(base, Symbol) or place.address.offset:
        raise PtxError("a part of a parameter is not known")
    name = base.name

    def execute(wave: Wave, lanes: Lanes) -> None:
        sizes = {each.name: each.bits for each in wave.program.parameters}
        if sizes.get(name) != place.size * 8:
            raise PtxError(f"parameter {name} has {sizes.get(name)} bits")
        value = np.asarray(wave.parameters[name] & ((1 << place.size * 8) - 1), unsigned(place.size * 8))
        wave.put(to, lanes, _extended(value, place, None, 0, to), any_width=True)

    return execute


def _extended(value: Array, place: _Place, undefined: Array | None, number: int, to: Operand) -> Bits:
    """A number of memory for a register, which may be wider: the sign goes with signed types."""
    if isinstance(to, Register) and to.bits > place.size * 8 and place.type[0] == "s":
        if undefined is not None:
            raise PtxError("the sign of an undefined value is not known")
        wide = value.view(signed(place.size * 8)).astype(signed(to.bits)).view(unsigned(to.bits))
        return Bits(wide)
    if undefined is None:
        return Bits(value)
    mine = undefined[:, number * place.size : (number + 1) * place.size]
    mask = (mine * (1 << np.arange(place.size))).sum(axis=1).astype(np.uint8)
    return Bits(value, mask if mask.any() else None)


def _bytes_of(masks: list[Array], size: int) -> Array | None:
    """Masks of undefined bytes as truth values, [lanes, count * size]."""
    if not any(each.any() for each in masks):
        return None
    spread = [each[:, None] >> np.arange(size, dtype=np.uint8) & 1 for each in masks]
    return np.concatenate(spread, axis=1).astype(bool)


def decode_policy(instruction: Instruction) -> Executor:
    """createpolicy: how long lines stay in a cache, which changes no number."""
    known = {f"createpolicy.fractional.L2::{how}.b64" for how in ("evict_first", "evict_last", "evict_normal")}
    if instruction.opcode not in known or len(instruction.operands) not in (1, 2):
        raise PtxError("this cache policy is not known")
    to = instruction.operands[0]
    return lambda wave, lanes: wave.put(to, lanes, Bits(np.asarray(0, np.uint64)))
