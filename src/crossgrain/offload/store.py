"""The stores of offloading: host memory, or a file in a directory.

A store reserves places for bytes. A place is freed when nothing refers to it any more: after the backward pass, or when
the graph is dropped, also because of an exception or Ctrl-C. So there is nothing to clean up explicitly.
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
    """Reserved space for some bytes in a store."""

    def __init__(self, store: Store, offset: int, room: int) -> None:
        self.store, self.offset, self.room = store, offset, room
        self.memory: Tensor | None = None

    def __del__(self) -> None:
        self.store._given_back.append((self.offset, self.room, self.memory))
        self.store._settle()


class Store:
    """Base class: a store of at most ``limit`` bytes."""

    name: str

    def __init__(self, limit: int | None) -> None:
        self._process = os.getpid()
        self._limit = limit
        self._lock = Lock()
        self._given_back: deque[tuple[int, int, Tensor | None]] = deque()

    @property
    def used(self) -> int:
        """The number of bytes that the store occupies now."""
        raise NotImplementedError

    def reserve(self, nbytes: int) -> Place:
        """Reserve space for ``nbytes`` bytes, or raise `OffloadError` without changing anything."""
        self.check_process()
        with self._lock:
            room = self._room(nbytes)
            place = Place(self, self._take(room, nbytes), room)
        self._settle()
        return place

    def write(self, place: Place, source: Tensor) -> None:
        """Write the bytes of ``source`` (uint8) to the place."""
        raise NotImplementedError

    def read(self, place: Place, nbytes: int) -> Tensor:
        """Read the bytes of the place as uint8, in new memory."""
        raise NotImplementedError

    def check_process(self) -> None:
        """Raise in a forked child process, which has neither the background thread nor its own file."""
        if os.getpid() != self._process:
            raise OffloadError(
                f"{self.name} was set up in process {self._process} and cannot be used in its forked child "
                f"{os.getpid()}; call crossgrain.offload in the child"
            )

    def _over_limit(self, nbytes: int) -> OverLimitError:
        return OverLimitError(
            f"{self.name}: storing {nbytes} bytes more would exceed the limit of {self._limit} bytes ({self.used} are "
            "in use). Raise limit_bytes, or pass over_limit='keep' to keep such tensors in memory"
        )

    def _settle(self) -> None:
        """Reclaim the places that were freed.

        A place can be freed at any moment, even while this thread holds the lock. Then the holder of the lock reclaims
        it.
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
    """Stores bytes in host memory, pinned if CUDA is available. With ``retain``, buffers are kept and reused."""

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
            memory = torch.empty(place.room, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
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
    """A private mapping of a place. It keeps the place reserved while the mapping is in use."""

    place: Place


class DirectoryStore(Store):
    """Stores bytes in a file without a name in a directory.

    The operating system removes the file when the process ends, however it ends. Space is reserved before bytes are
    written, so that a full disk is noticed in the call that reserves.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None = None) -> None:
        super().__init__(limit)
        self._directory = Path(directory)
        self.name = f"offload to {self._directory}"
        if not self._directory.is_dir():
            raise NotADirectoryError(f"{self.name}: this directory does not exist")
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
        return OffloadError(f"{self.name}: {nbytes} bytes could not be stored ({used} are in use): {error.strerror}")
