"""A wave of blocks that runs together: registers of all its lanes, its shared memory, and its place in the grid."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .counting import Report
from .errors import PtxError
from .lanes import Lanes
from .memory import SHARED_START, GlobalMemory, SharedMemory
from .races import Moment
from .source import Immediate, Operand, Program, Register, Sink, Special, Symbol
from .values import Array, Bits, every_byte, signed, undefined_mask, unsigned

Executor = Callable[["Wave", Lanes], None]
_GARBAGE = 0xDEADBEEFDEADBEEF  # what an undefined register holds: it should not pass for a number


class Wave:
    """Blocks ``first`` to ``first + blocks - 1`` of the grid."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        first: int,
        blocks: int,
        parameters: dict[str, int],
        memory: GlobalMemory,
        shared_bytes: int,
        report: Report,
    ) -> None:
        self.program = program
        self.parameters = parameters
        self.memory = memory
        self.report = report
        self.total = blocks * program.threads
        self.shared = SharedMemory(blocks, shared_bytes, program.threads, first * program.threads, report.tell_race)
        lane = np.arange(self.total)
        self.block = lane // program.threads
        self.warp = lane >> 5
        self._thread = (lane + 1 + first * program.threads).astype(np.int32)
        self._stamp = np.zeros(self.total >> 5, np.int32)  # of each warp
        self._special = _special_registers(program.threads, grid, lane % program.threads, self.block + first)
        self._values: dict[str, Array] = {}
        self._undefined: dict[str, Array] = {}

    # ---- registers -----------------------------------------------------------------------------

    def fetch(self, operand: Operand, bits: int, lanes: Lanes, *, any_width: bool = False) -> Bits:
        """What an operand holds, as unsigned numbers of ``bits``."""
        if isinstance(operand, Register):
            held = self._read(operand, lanes)
            if operand.bits == 1 and held.undefined is not None:
                raise PtxError(f"predicate {operand.name} is undefined")
            if operand.bits == bits:
                return held
            if not any_width or operand.bits < bits:
                raise PtxError(f"{operand.name} has {operand.bits} bits, the instruction reads {bits}")
            return Bits(held.value.astype(unsigned(bits)), _cut(held.undefined, bits))
        if isinstance(operand, Immediate):
            return Bits(constant(operand, bits))
        if isinstance(operand, Special) and bits == 32:
            if operand.name not in self._special:
                raise PtxError(f"register {operand.name} is not known")
            return Bits(lanes.take(self._special[operand.name]))
        if isinstance(operand, Symbol) and operand.name in self.program.shared and bits in (32, 64):
            return Bits(np.asarray(SHARED_START, unsigned(bits)))
        raise PtxError(f"an operand of {bits} bits cannot be {operand}")

    def _read(self, register: Register, lanes: Lanes) -> Bits:
        if register.name not in self._values:
            self.report.undefined[register.name] += 1
            garbage = np.asarray(_GARBAGE & ((1 << register.bits) - 1), unsigned(register.bits))
            return Bits(garbage, np.asarray(every_byte(register.bits), np.uint8))
        undefined = self._undefined.get(register.name)
        value = lanes.take(self._values[register.name])
        if undefined is None:
            return Bits(value)
        mine = lanes.take(undefined)
        return Bits(value, mine if mine.any() else None)

    def put(
        self, operand: Operand, lanes: Lanes, bits: Bits, *, any_width: bool = False, sign_fills: bool = False
    ) -> None:
        """Write a register, for these lanes alone. One that is wider is filled with zeros, or with the sign."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise PtxError(f"a result cannot go to {operand}")
        size = bits.value.dtype.itemsize * 8 if bits.value.dtype != bool else 1
        if operand.bits != size:
            if not any_width or operand.bits < size:
                raise PtxError(f"{operand.name} has {operand.bits} bits, the instruction writes {size}")
            bits = _sign_extended(bits, size, operand.bits) if sign_fills else _zero_extended(bits, operand.bits)
        if size == 1 and bits.undefined is not None and bits.undefined.any():
            raise PtxError("an undefined value decides a predicate")
        if lanes.index is None:
            self._values[operand.name] = bits.value if bits.value.ndim else np.full(self.total, bits.value)
            self._mark(operand.name, bits.undefined)
            return
        self._put_some(operand, lanes.index, bits)

    def _put_some(self, register: Register, index: Array, bits: Bits) -> None:
        old = self._values.get(register.name)
        undefined = self._undefined.get(register.name)
        if old is None:
            old = np.full(self.total, _GARBAGE & ((1 << register.bits) - 1), unsigned(register.bits))
            undefined = np.full(self.total, every_byte(register.bits), np.uint8)
        value = old.copy()
        value[index] = bits.value
        self._values[register.name] = value
        if undefined is not None or bits.undefined is not None:
            mask = np.zeros(self.total, np.uint8) if undefined is None else undefined.copy()
            mask[index] = undefined_mask(bits)
            self._mark(register.name, mask)

    def undefine(self, register: Register, lanes: Lanes) -> None:
        """Forget what a register holds."""
        if lanes.index is None:
            self._values.pop(register.name, None)
            self._undefined.pop(register.name, None)
        elif register.name in self._values:
            mask = self._undefined.get(register.name, np.zeros(self.total, np.uint8)).copy()
            mask[lanes.index] = every_byte(register.bits)
            self._undefined[register.name] = mask

    def _mark(self, name: str, undefined: Array | None) -> None:
        if undefined is not None and undefined.any():
            self._undefined[name] = np.broadcast_to(undefined, (self.total,))
        else:
            self._undefined.pop(name, None)

    # ---- time ----------------------------------------------------------------------------------

    def moment(self, lanes: Lanes) -> Moment:
        """Who the lanes are, and when it is for them."""
        numbers = lanes.numbers
        return Moment(self._thread[numbers], self._stamp[numbers >> 5])

    def pass_barrier(self, lanes: Lanes) -> None:
        """All threads of these blocks have met."""
        warps = np.unique(lanes.numbers >> 5)
        passed = (self._stamp[warps] >> 16) + 1
        if (passed >= 1 << 15).any():
            raise PtxError("more barriers than the emulator can count")
        self._stamp[warps] = passed << 16

    def pass_warp_barrier(self, lanes: Lanes) -> None:
        """All lanes of these warps have met."""
        self._stamp[np.unique(lanes.numbers >> 5)] += 1


@lru_cache(maxsize=4096)
def constant(operand: Immediate, bits: int) -> Array:
    """An immediate as an unsigned number of ``bits``."""
    text = operand.text
    if text[:2] in ("0f", "0F", "0d", "0D"):
        value, fits = int(text[2:], 16), bits == (32 if text[1] in "fF" else 64)
    elif "." in text:
        raise PtxError(f"constant {text} is not known here")
    else:
        value = int(text.rstrip("U"), 0)
        fits = -(1 << max(bits - 1, 0)) <= value < 1 << bits
    if not fits:
        raise PtxError(f"constant {text} is none of {bits} bits")
    out = np.asarray(value & ((1 << bits) - 1), unsigned(bits))
    out.setflags(write=False)  # others get the same
    return out


def _zero_extended(bits: Bits, wide: int) -> Bits:
    return Bits(bits.value.astype(unsigned(wide)), bits.undefined)


def _sign_extended(bits: Bits, size: int, wide: int) -> Bits:
    value = bits.value.view(signed(size)).astype(signed(wide)).view(unsigned(wide))
    if bits.undefined is None:
        return Bits(value)
    sign, above = 1 << (size // 8 - 1), every_byte(wide) & ~every_byte(size)
    return Bits(value, np.where(bits.undefined & sign, bits.undefined | above, bits.undefined).astype(np.uint8))


def _cut(undefined: Array | None, bits: int) -> Array | None:
    return None if undefined is None else undefined & np.uint8(every_byte(bits))


def _special_registers(threads: int, grid: tuple[int, int, int], thread: Array, block: Array) -> dict[str, Array]:
    x, y, z = grid
    every = {
        "%tid.x": thread, "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads, "%ntid.y": 1, "%ntid.z": 1,
        "%ctaid.x": block % x, "%ctaid.y": block // x % y, "%ctaid.z": block // (x * y),
        "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z, "%laneid": thread % 32,
    }  # fmt: skip
    return {name: np.asarray(value, np.uint32) for name, value in every.items()}
