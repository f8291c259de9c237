"""Who touched each byte, and whether two accesses to it have an order.

Two accesses to a byte race if they come from different threads, at least one writes, not both are atomic, and nothing
orders them. The rules, stricter than today's hardware where PTX promises nothing:

  * a thread's own accesses are in order;
  * ``bar.sync`` orders all accesses of a block; nothing orders accesses of different blocks;
  * ``bar.warp.sync`` orders all accesses of a warp. Shuffles, votes and reductions do not, and neither does the
    lockstep of a warp, which PTX does not promise;
  * a write of what is there already changes nothing that a reader could see: it counts as a read, which must be in
    order with writes of other numbers. So two threads may write the same number to the same place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .values import Array

_THREAD, _WARP, _BLOCK, _GRID = range(4)  # how far apart the threads are that touched a byte


class Moment(NamedTuple):
    """Threads and their times: one plus the thread's number in the grid, and a stamp.

    The upper bits of a stamp count barriers of the block, the lower 16 those of the warp since.
    """

    thread: Array
    stamp: Array


class _Log:
    """The last thread that touched each byte; its time; and how far apart all are that did so since then."""

    def __init__(self, size: int, threads: int) -> None:
        self._threads = threads  # of a block
        self.who = np.zeros(size, np.int32)  # 0: nobody
        self._stamp = np.zeros(size, np.int32)
        self._apart = np.zeros(size, np.int8)

    def clashes(self, rows: Array, width: int, now: Moment) -> Array | None:
        """Whether somebody else touched bytes without an order, [lanes, width]; None if nobody did."""
        who = self.who.reshape(-1, width)[rows]
        others = (who != 0) & (who != now.thread[:, None])
        apart = self._apart.reshape(-1, width)[rows]
        if not (others | (apart > _THREAD)).any():
            return None
        apart = np.maximum(apart, self._distance(who, now.thread[:, None]))
        return (who > 0) & (apart > _THREAD) & ~self._ordered(rows, width, now, apart)

    def set(self, rows: Array, width: int, now: Moment, where: Array) -> None:
        """Remember this access alone, at the bytes ``where`` says."""
        place: Any = rows
        lane: Any = np.s_[:, None]
        if not where.all():
            lane, byte = np.nonzero(where)
            place = (rows[lane], byte)
        self.who.reshape(-1, width)[place] = now.thread[lane]
        self._stamp.reshape(-1, width)[place] = now.stamp[lane]
        self._apart.reshape(-1, width)[place] = _THREAD

    def add(self, rows: Array, width: int, now: Moment) -> None:
        """Remember an access together with those before that are not in order with it."""
        who = self.who.reshape(-1, width)
        apart, stamp = self._apart.reshape(-1, width), self._stamp.reshape(-1, width)
        before, thread = who[rows], now.thread[:, None]
        level: Array = np.zeros((), np.int8)
        if before.any():
            level = np.maximum(apart[rows], self._distance(before, thread))
            level = np.where((before == 0) | self._ordered(rows, width, now, level), _THREAD, level).astype(np.int8)
        who[rows] = thread
        stamp[rows] = now.stamp[:, None]
        apart[rows] = level
        # Several lanes of this access may have the same bytes: the last one is written down, so all others say so.
        last = who[rows]
        if level.any() or (last != thread).any():
            among = np.maximum(level, self._distance(last, thread))
            for each in (_WARP, _BLOCK, _GRID):
                lane, byte = np.nonzero(among == each)
                apart[rows[lane], byte] = each

    def _ordered(self, rows: Array, width: int, now: Moment, apart: Array) -> Array:
        then = self._stamp.reshape(-1, width)[rows]
        stamp = now.stamp[:, None]
        by_block = (apart <= _BLOCK) & (then >> 16 < stamp >> 16)
        return by_block | ((apart <= _WARP) & (then < stamp))

    def _distance(self, one: Array, other: Array) -> Array:
        a, b = one - 1, other - 1
        block = np.where(a // self._threads == b // self._threads, _BLOCK, _GRID)
        return np.where(a == b, _THREAD, np.where(a >> 5 == b >> 5, _WARP, block)).astype(np.int8)


class Races:
    """Watches the bytes of one buffer, or of the shared memory of all blocks."""

    def __init__(self, size: int, threads: int, name: str, tell: Callable[[str], None]) -> None:
        self._name = name
        self.tell = tell  # what is done about a race
        self._writes = _Log(size, threads)
        self._reads = _Log(size, threads)
        self._size, self._threads = size, threads
        self._atomics: _Log | None = None

    def was_written(self, rows: Array, width: int) -> Array:
        """Whether the bytes were written at all, [lanes, width]."""
        found: Array = self._writes.who.reshape(-1, width)[rows] > 0
        return found if self._atomics is None else found | (self._atomics.who.reshape(-1, width)[rows] > 0)

    def read(self, rows: Array, width: int, now: Moment) -> None:
        """Bytes ``width * row`` and following are read."""
        self._check(self._writes, rows, width, now, "is read, and written by")
        if self._atomics is not None:
            self._check(self._atomics, rows, width, now, "is read, and changed atomically by")
        self._reads.add(rows, width, now)

    def write(self, rows: Array, width: int, now: Moment, changed: Array) -> None:
        """They are written; ``changed`` says which bytes are not what they were, [lanes, width]."""
        if self._atomics is not None:
            self._check(self._atomics, rows, width, now, "is written, and changed atomically by")
        self._check(self._writes, rows, width, now, "is written, and written by", changed)
        self._check(self._reads, rows, width, now, "is written, and read or left alone by", changed)
        kept = ~changed.all(axis=1)
        self._reads.add(rows[kept], width, Moment(now.thread[kept], now.stamp[kept]))
        self._writes.set(rows, width, now, changed)

    def change(self, rows: Array, width: int, now: Moment) -> None:
        """They are changed atomically."""
        self._check(self._writes, rows, width, now, "is changed atomically, and written by")
        self._check(self._reads, rows, width, now, "is changed atomically, and read or left alone by")
        if self._atomics is None:
            self._atomics = _Log(self._size, self._threads)
        self._atomics.add(rows, width, now)

    def _check(self, log: _Log, rows: Array, width: int, now: Moment, what: str, where: Array | None = None) -> None:
        clash = log.clashes(rows, width, now)
        if clash is None:
            return
        if where is not None:
            clash = clash & where
        if clash.any():
            lane, byte = (int(each[0]) for each in np.nonzero(clash))
            place = int(rows[lane]) * width + byte
            one, other = int(now.thread[lane]) - 1, int(log.who[place]) - 1
            self.tell(
                f"race: byte {place} of {self._name} {what} another thread without a barrier between: "
                f"block {one // self._threads} thread {one % self._threads}, "
                f"block {other // self._threads} thread {other % self._threads}"
            )
