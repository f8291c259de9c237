"""Global buffers and shared memory: bounds, alignment, races and undefined bytes of every access."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import PtxError
from .races import Moment, Races
from .values import Array, unsigned

_BASE = 1 << 40  # each buffer lies at a multiple of this, so that no offset leads from one into another
_PADDING = 64  # bytes behind a buffer that nobody may change; and rows of every width are whole
_CANARY = 0xA5
SHARED_START = 1024  # of the dynamic shared memory, so that an address of zero is outside


@dataclass(frozen=True)
class Pointer:
    """An argument that points into the middle of a buffer."""

    array: np.ndarray[Any, Any]
    byte_offset: int


class _Bytes:
    """Bytes with their watchers; widths divide all places, so an access is a row."""

    def __init__(self, data: Array, threads: int, name: str, tell: Callable[[str], None]) -> None:
        self.data = data
        self._name = name
        self.races = Races(len(data), threads, name, tell)

    def load(self, rows: Array, size: int, count: int, now: Moment) -> Array:
        self.races.read(rows, size * count, now)
        return np.asarray(self.data.view(unsigned(size * 8)).reshape(-1, count)[rows])

    def store(self, rows: Array, value: Array, now: Moment, fresh: Array | None = None) -> None:
        """``value`` [lanes, count]; ``fresh`` are bytes that had nothing before."""
        size, count = value.dtype.itemsize, value.shape[1]
        there = self.data.view(value.dtype).reshape(-1, count)
        raw = np.ascontiguousarray(value).view(np.uint8).reshape(len(rows), size * count)
        changed = raw != np.ascontiguousarray(there[rows]).view(np.uint8).reshape(raw.shape)
        there[rows] = value
        lost = np.nonzero((there[rows] != value).any(axis=1))[0]
        if len(lost):
            place = int(rows[lost[0]]) * size * count
            what = f"race: threads write different numbers to byte {place} of {self._name} in one instruction"
            self.races.tell(what)
        self.races.write(rows, size * count, now, changed if fresh is None else changed | fresh)


class GlobalMemory:
    """The buffers of a launch. They are copied here, and copied back when all has gone well."""

    def __init__(self, arguments: Sequence[object], threads: int, tell: Callable[[str], None]) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._buffers: list[_Bytes] = []
        for each in arguments:
            array = each.array if isinstance(each, Pointer) else each
            if isinstance(array, np.ndarray) and self._number(array) is None:
                self._add(array, threads, tell)

    def _add(self, array: np.ndarray[Any, Any], threads: int, tell: Callable[[str], None]) -> None:
        if not array.flags.c_contiguous:
            raise PtxError("a buffer must be contiguous")
        if any(np.may_share_memory(array, other) for other in self._arrays):
            raise PtxError("two buffers overlap: pass the whole one, and a Pointer into it")
        size = -(-array.nbytes // 32) * 32 + _PADDING
        data = np.full(size, _CANARY, np.uint8)
        data[: array.nbytes] = array.reshape(-1).view(np.uint8)
        self._buffers.append(_Bytes(data, threads, f"buffer {len(self._buffers)}", tell))
        self._arrays.append(array)

    def _number(self, array: np.ndarray[Any, Any]) -> int | None:
        for number, other in enumerate(self._arrays):
            if array.ctypes.data == other.ctypes.data and array.nbytes == other.nbytes:
                return number
        return None

    def address(self, argument: np.ndarray[Any, Any] | Pointer) -> int:
        """Where an argument points to."""
        pointer = argument if isinstance(argument, Pointer) else Pointer(argument, 0)
        number = self._number(pointer.array)
        assert number is not None
        return (number + 1) * _BASE + pointer.byte_offset

    def copy_back(self) -> None:
        """Give the callers' arrays what was written."""
        for array, buffer in zip(self._arrays, self._buffers, strict=True):
            if (buffer.data[array.nbytes :] != _CANARY).any():
                raise PtxError("the emulator wrote behind a buffer: this is an error of its own")
            if array.flags.writeable:
                array.reshape(-1).view(np.uint8)[:] = buffer.data[: array.nbytes]
            elif not np.array_equal(array.reshape(-1).view(np.uint8), buffer.data[: array.nbytes]):
                raise PtxError("the kernel writes to a buffer that is read-only")

    def load(self, address: Array, size: int, count: int, now: Moment) -> Array:
        """[lanes, count] numbers of ``size`` bytes."""
        out = np.empty((len(address), count), unsigned(size * 8))
        for buffer, lanes, place in self._places(address, size * count):
            out[lanes] = buffer.load(place // (size * count), size, count, Moment(now.thread[lanes], now.stamp[lanes]))
        return out

    def store(self, address: Array, value: Array, now: Moment) -> None:
        """Write [lanes, count] numbers."""
        width = value.dtype.itemsize * value.shape[1]
        for buffer, lanes, place in self._places(address, width):
            buffer.store(place // width, value[lanes], Moment(now.thread[lanes], now.stamp[lanes]))

    def change(self, address: Array, value: Array, dtype: type[Any], how: np.ufunc, now: Moment) -> Array:
        """Change numbers atomically, in the order of lanes; what was there before."""
        out = np.empty(len(address), value.dtype)
        for buffer, lanes, place in self._places(address, value.dtype.itemsize):
            rows = place // value.dtype.itemsize
            buffer.races.change(rows, value.dtype.itemsize, Moment(now.thread[lanes], now.stamp[lanes]))
            there = buffer.data.view(dtype)
            out[lanes] = there[rows].view(value.dtype)
            how.at(there, rows, value[lanes].view(dtype))
        return out

    def _places(self, address: Array, width: int) -> list[tuple[_Bytes, Array | slice, Array]]:
        """(buffer, lanes, offsets) of checked addresses."""
        if (address % width).any():
            wrong = int(address[np.nonzero(address % width)[0][0]])
            raise PtxError(f"misaligned access: {width} bytes at offset {wrong % _BASE} of buffer {wrong // _BASE - 1}")
        number = address // _BASE - 1
        found: list[tuple[_Bytes, Array | slice, Array]] = []
        for each in np.unique(number) if number.min() != number.max() else number[:1]:
            if not 0 <= each < len(self._buffers):
                raise PtxError(f"access to no buffer: address {int(address[number == each][0]):#x}")
            lanes: Array | slice = slice(None) if (number == each).all() else np.nonzero(number == each)[0]
            place = address[lanes] % _BASE
            if (place + width > self._arrays[each].nbytes).any():
                raise PtxError(
                    f"out of bounds: {width} bytes at offset {int(place.max())} of buffer {each}, "
                    f"which has {self._arrays[each].nbytes}"
                )
            found.append((self._buffers[each], lanes, place))
        return found


class SharedMemory:
    """The shared memory of all blocks of a wave, one after the other."""

    def __init__(self, blocks: int, size: int, threads: int, first_thread: int, tell: Callable[[str], None]) -> None:
        self._size = size
        self._stride = -(-size // 32) * 32
        self._first = first_thread  # of the wave: watchers count from it
        self._bytes = _Bytes(np.zeros(blocks * self._stride, np.uint8), threads, "shared memory", tell)
        self._undefined: Array | None = None

    def load(self, block: Array, address: Array, size: int, count: int, now: Moment) -> tuple[Array, Array | None]:
        """[lanes, count] numbers of ``size`` bytes, and which of their bytes are undefined, [lanes, count * size]."""
        width = size * count
        rows = self._rows(block, address, width)
        if not self._bytes.races.was_written(rows, width).all():
            raise PtxError("shared memory is read that nobody wrote")
        value = self._bytes.load(rows, size, count, self._moment(now))
        return value, None if self._undefined is None else self._undefined.reshape(-1, width)[rows]

    def store(self, block: Array, address: Array, value: Array, undefined: Array | None, now: Moment) -> None:
        """Write [lanes, count] numbers, of which the bytes ``undefined``, [lanes, count * size], are not known."""
        width = value.dtype.itemsize * value.shape[1]
        rows = self._rows(block, address, width)
        fresh = ~self._bytes.races.was_written(rows, width)
        if undefined is not None and self._undefined is None:
            self._undefined = np.zeros(len(self._bytes.data), bool)
        if self._undefined is not None:
            self._undefined.reshape(-1, width)[rows] = False if undefined is None else undefined
        self._bytes.store(rows, value, self._moment(now), fresh)

    def _rows(self, block: Array, address: Array, width: int) -> Array:
        if (address % width).any():
            raise PtxError(f"misaligned access: {width} bytes of shared memory")
        place = address - SHARED_START
        if ((place < 0) | (place + width > self._size)).any():
            raise PtxError(
                f"out of bounds: {width} bytes at offset {int(place.min())} to {int(place.max())} of shared memory, "
                f"which has {self._size}"
            )
        return np.asarray((block * self._stride + place) // width)

    def _moment(self, now: Moment) -> Moment:
        return Moment(now.thread - self._first, now.stamp)
