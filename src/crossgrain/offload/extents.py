"""Keep track of which parts of a file are in use, and reuse the free ones."""

from __future__ import annotations

import bisect


class Extents:
    """Allocates parts of a file that grows at its end. ``end`` is the offset where the last used part ends."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # offset and size, in order, never adjacent, never at the end

    def take(self, size: int) -> int:
        """Allocate ``size`` bytes and return their offset. The first free part that is large enough is used."""
        for at, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[at : at + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        offset, self.end = self.end, self.end + size
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Free a part that `take` has allocated."""
        at = bisect.bisect(self._free, (offset, size))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size, at = size + before, at - 1
        if offset + size == self.end:
            self.end = offset
        else:
            self._free.insert(at, (offset, size))
