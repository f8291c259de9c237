"""Where bytes go: host memory, or a file in a directory.

A store hands out places. A place is given back by nobody referring to it any more, be it a graph that was used
up, one that was dropped, or one that an exception or Ctrl-C left behind: there is no list of things to clean up.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .errors import OffloadError, OverLimitError
from .extents import Extents


class Place:
    """Room for some bytes in a store."""

    def __init__(self, store: Store, offset: int, room: int) -> None:
        self.store, self.offset, self.room = store, offset, room
        self.memory: Tensor | None = None

    def __del__(self) -> None:
        self.store._given_back.append((self.offset, self.room, self.memory))
        self.store._settle()


class Store:
    """Places for bytes, ``limit`` bytes at most."""

    name: str

    def __init__(self, limit: int | None) -> None:
        self._process = os.getpid()
        self._limit = limit
        self._lock = Lock()
        self._given_back: deque[tuple[int, int, Tensor | None]] = deque()

    @property
    def used(self) -> int:
        """Bytes that the store takes now."""
        raise NotImplementedError

    def reserve(self, nbytes: int) -> Place:
        """A place, or `OffloadError` and nothing changed."""
        self.check_process()
        with self._lock:
            room = self._room(nbytes)
            place = Place(self, self._take(room, nbytes), room)
        self._settle()
        return place

    def write(self, place: Place, source: Tensor) -> None:
        """Fill the place with the bytes of ``source``, uint8."""
        raise NotImplementedError

    def read(self, place: Place, nbytes: int) -> Tensor:
        """The bytes of the place, uint8, in memory of their own."""
        raise NotImplementedError

    def check_process(self) -> None:
        """A child of a fork has neither the thread nor a file of its own."""
        if os.getpid() != self._process:
            raise OffloadError(f"{self.name} belongs to process {self._process}, of which this is a fork")

    def _over_limit(self, nbytes: int) -> OverLimitError:
        return OverLimitError(
            f"{self.name}: {nbytes} bytes more would pass the limit of {self._limit} bytes, {self.used} are in use"
        )

    def _settle(self) -> None:
        """Take back what was given back.

        Places die anywhere, even while this thread holds the lock: then whoever holds it does this next.
        """
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                while self._given_back:
                    offset, room, memory = self._given_back.popleft()
                    if os.getpid() == self._process:
                        self._give_back(offset, room, memory)
            finally:
                self._lock.release()

    def _room(self, nbytes: int) -> int:
        return nbytes

    def _take(self, room: int, nbytes: int) -> int:
        raise NotImplementedError

    def _give_back(self, offset: int, room: int, memory: Tensor | None) -> None:
        raise NotImplementedError


class HostStore(Store):
    """Host memory, pinned where there is CUDA. ``retain``: buffers are kept and used again."""

    def __init__(self, limit: int | None = None, *, retain: bool = False) -> None:
        super().__init__(limit)
        self.name = "offload to host memory"
        self._retain = retain
        self._used = 0
        self._retained: dict[int, list[Tensor]] = {}

    @property
    def used(self) -> int:
        return self._used

    def write(self, place: Place, source: Tensor) -> None:
        with self._lock:
            again = self._retained.get(place.room)
            memory = again.pop() if again else None
        self._settle()
        if memory is None:
            memory = torch.empty(place.room, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        place.memory = memory.copy_(source)

    def read(self, place: Place, nbytes: int) -> Tensor:
        assert place.memory is not None
        return place.memory.clone()

    def _take(self, room: int, nbytes: int) -> int:
        if self._limit is not None and self._used + room > self._limit:
            raise self._over_limit(nbytes)
        self._used += room
        return 0

    def _give_back(self, offset: int, room: int, memory: Tensor | None) -> None:
        self._used -= room
        if self._retain and memory is not None:
            self._retained.setdefault(room, []).append(memory)


class _Mapping(mmap.mmap):
    """A private mapping, which keeps its place: the file is not used for anything else underneath."""

    place: Place


class DirectoryStore(Store):
    """A file without a name in a directory.

    The system removes it with the last process that has it open, however that ends. Bytes are reserved before they
    are written, and written with errors: a disk that is full is noticed in the call that asks for room.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None = None) -> None:
        super().__init__(limit)
        self._directory = Path(directory)
        self.name = f"offload to {self._directory}"
        if not self._directory.is_dir():
            raise NotADirectoryError(f"{self.name}: there is no such directory")
        self._extents = Extents()
        self._file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    @property
    def used(self) -> int:
        return self._extents.end

    def write(self, place: Place, source: Tensor) -> None:
        rest, at = memoryview(source.numpy().data), place.offset
        try:
            while rest:
                written = os.pwrite(self._file.fileno(), rest, at)
                rest, at = rest[written:], at + written
        except OSError as error:
            raise self._failed(source.numel(), self.used, error) from error

    def read(self, place: Place, nbytes: int) -> Tensor:
        self.check_process()
        mapping = _Mapping(self._file.fileno(), place.room, offset=place.offset, access=mmap.ACCESS_COPY)
        mapping.place = place
        pages = torch.frombuffer(mapping, dtype=torch.uint8)
        pages[:: mmap.PAGESIZE].sum()  # reads the file now, in the thread that is here to wait for it
        return pages[:nbytes]

    def _room(self, nbytes: int) -> int:
        pages = -(-nbytes // mmap.ALLOCATIONGRANULARITY)  # what can be mapped
        return pages * mmap.ALLOCATIONGRANULARITY

    def _take(self, room: int, nbytes: int) -> int:
        before = self._extents.end
        offset = self._extents.take(room)
        try:
            if self._limit is not None and self._extents.end > max(before, self._limit):
                raise self._over_limit(nbytes)
            if self._extents.end > before:
                self._grow(before, self._extents.end - before, nbytes)
        except BaseException:
            self._extents.give_back(offset, room)
            raise
        return offset

    def _grow(self, end: int, more: int, nbytes: int) -> None:
        descriptor = self._file.fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, end, more)
            else:
                os.ftruncate(descriptor, end + more)
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise self._failed(nbytes, end, error) from error

    def _give_back(self, offset: int, room: int, memory: Tensor | None) -> None:
        before = self._extents.end
        self._extents.give_back(offset, room)
        if self._extents.end < before and not self._file.closed:  # the collector may close it first
            os.ftruncate(self._file.fileno(), self._extents.end)

    def _failed(self, nbytes: int, used: int, error: OSError) -> OffloadError:
        return OffloadError(f"{self.name}: {nbytes} bytes could not be stored, {used} are in use: {error.strerror}")
