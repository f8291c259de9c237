"""What an access costs: 32-byte sectors of global memory, and turns of the 32 banks of shared memory."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .errors import PtxError
from .values import Array

_SECTOR = 32
_BANKS = 32


class Access(NamedTuple):
    """A kind of access: ld, st, atom or red, and its bytes for each thread."""

    verb: str
    width: int


@dataclass
class Sectors:
    """Global memory: ``wanted`` different bytes of all warps, ``moved`` in whole sectors."""

    requests: int = 0
    wanted: int = 0
    moved: int = 0

    @property
    def used(self) -> float:
        """The share of the moved bytes that somebody wanted."""
        return self.wanted / self.moved


@dataclass
class Conflicts:
    """Shared memory: ``turns`` that the banks took, and how many were needed without conflicts."""

    requests: int = 0
    turns: int = 0
    needed: int = 0


@dataclass
class Report:
    """What a run did. Instructions count once for each warp that executed them."""

    counts: Counter[str] = field(default_factory=Counter)
    sectors: dict[Access, Sectors] = field(default_factory=dict)
    conflicts: dict[Access, Conflicts] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)  # those that did not end the run
    undefined: Counter[str] = field(default_factory=Counter)  # registers that were read before they were written
    raise_races: bool = True

    def tell_race(self, what: str) -> None:
        """End the run with an error, or write the race down."""
        if self.raise_races:
            raise PtxError(what)
        self.races.append(what)

    @property
    def instructions(self) -> int:
        """All instructions of all warps."""
        return self.counts.total()

    def count(self, prefix: str) -> int:
        """Instructions of an opcode, with all modifiers: ``count("fma")``."""
        return sum(n for name, n in self.counts.items() if name == prefix or name.startswith(f"{prefix}."))

    def add_global(self, access: Access, warp: Array, address: Array) -> None:
        """One instruction: ``warp`` and ``address`` for each lane."""
        entry = self.sectors.setdefault(access, Sectors())
        entry.requests += len(_different(warp))
        row = warp.astype(np.int64) << 44 | address // access.width
        entry.wanted += len(_different(row)) * access.width
        sector = warp.astype(np.int64) << 44 | address // _SECTOR
        entry.moved += len(_different(sector)) * _SECTOR

    def add_shared(self, access: Access, warp: Array, lane: Array, address: Array) -> None:
        """One instruction; wide accesses are served in parts: 16 lanes of 8 bytes, 8 lanes of 16."""
        entry = self.conflicts.setdefault(access, Conflicts())
        entry.requests += len(_different(warp))
        together = min(32, 128 // access.width)
        group = warp.astype(np.int64) * (32 // together) + lane // together
        words = max(1, access.width // 4)
        word = (address[:, None] // 4 + np.arange(words)).reshape(-1)
        different = _different(np.repeat(group, words) << 24 | word)  # a word that several lanes have costs once
        parts = _different(different >> 24)
        number = np.searchsorted(parts, different >> 24)
        load = np.bincount(number * _BANKS + (different & 0xFFFFFF) % _BANKS, minlength=len(parts) * _BANKS)
        entry.turns += int(load.reshape(-1, _BANKS).max(axis=1).sum())
        entry.needed += len(parts)


def _different(numbers: Array) -> Array:
    """Each number once, in order; faster than np.unique on numbers that are nearly in order."""
    ordered = np.sort(numbers)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
