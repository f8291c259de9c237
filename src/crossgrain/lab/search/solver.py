"""`Solver`: the choices of a problem with the least harm that reach a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from .costs import BYTES
from .knapsack import Option, Solution, solve
from .problem import Choice, Problem

_BITS = 60  # sums of what is chosen have at most so many bits: finer than floating point numbers
_APART = 70  # bits between parts of a harm, of which an earlier one decides before a later one
_NEVER = 2**100  # bytes of what may not be chosen
NEAR = 1e-9  # a target is reached if so small a part of it is missing: 2 / 3 of six sites are four of them


class Solver:
    """Finds the number of each move's choice.

    Harm is a list of things, of which an earlier one decides before a later one. It is written as one whole number.
    """

    def __init__(self, problem: Problem) -> None:
        self._moves = [move.choices for move in problem.moves]
        self._seconds, self._second = self._whole(lambda choice: choice.cost.seconds)
        self._nats, self._nat = self._whole(lambda choice: choice.nats.mean)
        self._ranks, _ = self._whole(lambda choice: choice.rank)
        self._bytes = {
            name: [
                [getattr(choice.cost, name) if choice.cost.seconds <= 0 else _NEVER for choice in choices]
                for choices in self._moves
            ]
            for name in BYTES
        }

    def _whole(self, value: Callable[[Choice], float]) -> tuple[list[list[int]], int]:
        """Values of all choices as whole numbers of 1 / 2**n, and n."""
        values = [[value(choice) for choice in choices] for choices in self._moves]
        largest = math.fsum(max(map(abs, own)) for own in values)
        digits = _BITS - math.frexp(largest)[1] if largest else 0
        return [[round(math.ldexp(own, digits)) for own in each] for each in values], digits

    def at_saving(self, share: float, more: float = 0.0) -> Solution | None:
        """The least harm that saves at least this share of the seconds that can be saved, and some seconds more."""
        possible = -sum(min(own) for own in self._seconds)
        needed = math.ceil(Fraction(share - NEAR) * possible) + math.ceil(math.ldexp(more, self._second))
        return self._solve(self._harms(self._nats, self._ranks, self._seconds), [(self._seconds, -needed)])

    def within_gap(self, nats: float) -> Solution | None:
        """The most seconds that are saved with at most so many nats."""
        largest = math.fsum(max(abs(choice.nats.mean) for choice in choices) for choices in self._moves)
        limit = math.floor(math.ldexp(nats + NEAR * largest, self._nat))
        return self._solve(self._harms(self._seconds, self._nats, self._ranks), [(self._nats, limit)])

    def within_bytes(self, more: Mapping[str, int]) -> Solution | None:
        """The least harm with at most so many bytes more than the base (below 0 for fewer), and no slower GEMM."""
        limits = [(self._bytes[name], limit) for name, limit in more.items()]
        return self._solve(self._harms(self._nats, self._ranks, self._seconds), limits)

    def least(self, name: str) -> float:
        """The lowest sum of "seconds", "nats", "saved" or "gathered" that can be reached."""
        values = {"seconds": self._seconds, "nats": self._nats, **self._bytes}[name]
        total = sum(min(own) for own in values)
        digits = {"seconds": self._second, "nats": self._nat}.get(name, 0)
        return math.ldexp(total, -digits)

    @staticmethod
    def _harms(*parts: Sequence[Sequence[int]]) -> list[list[int]]:
        harms = [[0] * len(own) for own in parts[0]]
        for part in parts:
            harms = [
                [(harm << _APART) + value for harm, value in zip(old, new, strict=True)]
                for old, new in zip(harms, part, strict=True)
            ]
        return harms

    @staticmethod
    def _solve(harms: list[list[int]], limited: Sequence[tuple[list[list[int]], int]]) -> Solution | None:
        classes = [
            [Option(harm, tuple(costs[i][j] for costs, _ in limited)) for j, harm in enumerate(own)]
            for i, own in enumerate(harms)
        ]
        return solve(classes, [limit for _, limit in limited])
