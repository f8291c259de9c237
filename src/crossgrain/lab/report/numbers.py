"""Numbers and texts as small as they can be in JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..intervals import Estimate

DIGITS = 5  # significant ones; more than any interval has
_PIECES = re.compile(r"([|;,] ?)")


def short(value: float | None) -> float | int | None:
    """A number with `DIGITS` significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def triple(estimate: Estimate | Sequence[float | None] | None) -> list[float | int | None] | None:
    """Mean, lower and upper end of an interval; ends that are infinite are None."""
    if estimate is None:
        return None
    if isinstance(estimate, Estimate):
        estimate = (estimate.mean, estimate.low, estimate.high)
    return [short(value) for value in estimate[:3]]


class Pieces:
    """Texts that have much in common, such as recipes, as numbers of pieces: each piece is stored once.

    Attributes:
        all: the pieces.
    """

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def numbers_of(self, text: str) -> list[int]:
        """The numbers of the pieces of a text; joined, they are the text."""
        return [self._number(piece) for piece in _PIECES.split(text) if piece]

    def _number(self, piece: str) -> int:
        if piece not in self._numbers:
            self._numbers[piece] = len(self.all)
            self.all.append(piece)
        return self._numbers[piece]


def without_none(mapping: dict[str, Any]) -> dict[str, Any]:
    """The mapping without what is None."""
    return {key: value for key, value in mapping.items() if value is not None}


def thinned(points: int, most: int) -> Iterable[int]:
    """Positions of at most ``most`` of so many points: evenly spread, with the last one."""
    step = max(1, math.ceil(points / most))
    return reversed(range(points - 1, -1, -step))
