"""Find the operands that make a difference, with few runs.

Operands are raised in groups: first all of one kind, such as dgrad.grad_output of all layers; groups that explain a
part of the difference are halved, those that explain most of it first, down to single operands.

Some differences have several causes, each of which is enough: an operand that is raised alone then explains nothing.
It is noticed by a group that explains more than its halves, and a smallest set of operands is found by bisection:
operands are raised from the first one on until the difference disappears; the last one that was needed is part of the
set; then the same again with this one raised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from .looking import Site

ENOUGH = 0.8  # a share of the difference that needs no further search
HALF = 0.5  # operands that explain less, together, are not called culprits
LEAST = 0.1  # groups that explain less are not looked into
MOST = 4  # operands that are called an explanation; more of them are none

Explained = Callable[[Collection[Site]], float]
"""The share of the difference that disappears when these operands are raised."""


class OutOfRuns(Exception):
    """There are no runs left."""


@dataclass
class Found:
    """What a search has found.

    Attributes:
        single: the share of each operand that was raised alone.
        kinds: the share of all operands of a kind, such as dgrad.grad_output.
        groups: shares of groups that were not looked into any further.
        culprits: the fewest operands that together explain the difference; empty if no few explain half of it.
        share: the share that they explain together.
        complete: the search has come to its end.
    """

    single: dict[Site, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)
    groups: list[tuple[list[Site], float]] = field(default_factory=list)
    culprits: list[Site] = field(default_factory=list)
    share: float = 0.0
    complete: bool = False


def search(sites: Sequence[Site], explained: Explained, found: Found) -> None:
    """Find the operands that explain a difference.

    Args:
        sites: all operands, in the order in which they are used.
        explained: the share that raising some of them explains. It raises `OutOfRuns` to end the search.
        found: what was found. It is filled in as the search goes on.
    """
    try:
        _Search(found, sites, explained).run()
        found.complete = True
    except OutOfRuns:
        _take_best(found)


class _Search:
    def __init__(self, found: Found, sites: Sequence[Site], explained: Explained) -> None:
        self._found, self._sites, self._explained = found, sites, explained
        self._heap: list[tuple[float, int, list[Site]]] = []  # negative share, number, members
        self._pushed = 0
        self._entangled: list[tuple[float, list[Site]]] = []

    def run(self) -> None:
        kinds: dict[str, list[Site]] = {}
        for site in self._sites:
            kinds.setdefault(site.operand, []).append(site)
        self._look_into(list(self._sites), 1.0, list(kinds.values()), self._found.kinds)
        while self._heap and not self._is_done():
            share, _, members = heapq.heappop(self._heap)
            middle = len(members) // 2
            self._look_into(members, -share, [members[:middle], members[middle:]])
        self._found.groups += [(members, -share) for share, _, members in self._heap]
        _take_best(self._found)
        if self._found.share < ENOUGH:
            self._combine()
        if self._found.share < ENOUGH:
            self._disentangle()

    def _is_done(self) -> bool:
        """Whether an operand explains the difference, and nothing that is left to examine could do so as well."""
        return max(self._found.single.values(), default=0.0) >= ENOUGH > -self._heap[0][0]

    def _look_into(
        self, members: list[Site], share: float, parts: list[list[Site]], kinds: dict[str, float] | None = None
    ) -> None:
        """Raise each part of a group, whose share is known. If the parts are kinds, their shares are noted there."""
        total = 0.0
        for part in parts:
            own = share if len(parts) == 1 else self._explained(part)
            total += max(0.0, own)
            if kinds is not None:
                kinds[part[0].operand] = own
            if len(part) == 1:
                self._found.single[part[0]] = own
            elif own >= LEAST:
                self._pushed += 1
                heapq.heappush(self._heap, (-own, self._pushed, part))
            else:
                self._found.groups.append((part, own))
        if total < share / 2:
            self._entangled.append((share, members))

    def _combine(self) -> None:
        """Raise the best operands together, as many as it takes."""
        single = self._found.single
        ranked = sorted((site for site in single if single[site] >= LEAST), key=lambda site: -single[site])
        for count in range(2, min(MOST, len(ranked)) + 1):
            if sum(single[site] for site in ranked[:count]) < ENOUGH / 2 and count < MOST:
                continue  # far from enough, unless they have little to do with each other
            self._take(ranked[:count])
            if self._found.share >= ENOUGH:
                return

    def _disentangle(self) -> None:
        """Look for a smallest set in groups that explain more than their parts."""
        for share, members in sorted(self._entangled, key=lambda item: -item[0]):
            chosen = smallest_set(members, partial(self._reaches, ENOUGH * share))
            if chosen:
                self._take(chosen)
            if self._found.share >= ENOUGH:
                return

    def _take(self, sites: list[Site]) -> None:
        """Call operands the culprits, if they explain enough, or much more than those that were found before."""
        share, found = self._explained(sites), self._found
        if share >= HALF and (share >= ENOUGH or share > found.share + LEAST):
            found.culprits, found.share = sites, share

    def _reaches(self, least: float, some: list[Site]) -> bool:
        return self._explained(some) >= least


def smallest_set(members: Sequence[Site], enough: Callable[[list[Site]], bool]) -> list[Site]:
    """A smallest set of operands that is enough, if all of them are; empty if it takes more than a few.

    It is right if raising one more operand never makes things worse.
    """
    chosen: list[Site] = []
    end = len(members)
    while len(chosen) < MOST:
        low, high = 0, end  # the first `high` operands and the chosen ones are enough, the first `low` are not
        while high - low > 1:
            middle = (low + high) // 2
            if enough([*members[:middle], *chosen]):
                high = middle
            else:
                low = middle
        chosen.append(members[high - 1])
        end = high - 1
        if end == 0 or enough(chosen):
            return chosen[::-1]
    return []


def _take_best(found: Found) -> None:
    best = max(found.single, key=lambda site: found.single[site], default=None)
    if best is not None and found.single[best] >= HALF and found.single[best] > found.share:
        found.culprits, found.share = [best], found.single[best]
