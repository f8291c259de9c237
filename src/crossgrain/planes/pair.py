"""The two planes of a matrix, without a tensor around them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .plane import ROWWISE, Direction, Plane


class PlaneSource(Protocol):
    """Whatever has planes: a pair of them, a quantized storage or tensor."""

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction, or None if it is absent."""


class PlanePair(NamedTuple):
    """What a quantizer makes of a matrix; None where a direction was not asked for."""

    rowwise: Plane | None
    columnwise: Plane | None

    def plane(self, direction: Direction) -> Plane | None:
        return self.rowwise if direction is ROWWISE else self.columnwise
