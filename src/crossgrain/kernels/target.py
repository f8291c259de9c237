"""`Target` and `GroupedTarget`: planes that kernels write, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Plane
from ..planes.groups import PlaneGroups


class Within(NamedTuple):
    """Where a matrix lies in a larger one, in which the positions for stochastic rounding are counted.

    Attributes:
        row: the row of the larger matrix with which it begins.
        column: the column with which it begins.
        width: the number of columns of the larger matrix.
    """

    row: int
    column: int
    width: int


@dataclass(frozen=True, eq=False)
class Target:
    """A plane to write, and how to choose its bytes.

    Attributes:
        plane: the plane.
        encoding: how the bytes are chosen.
        amax: the global amax, which was measured before, and perhaps reduced over ranks.
        scale: for per-tensor formats: a given scale to multiply with (delayed scaling).
        within: where the input lies in a larger tensor, with whose random numbers it is rounded; None for itself.
    """

    plane: Plane
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None
    within: Within | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the amax of the whole input."""
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> Target:
        """The same target with an amax."""
        return Target(self.plane, self.encoding, amax, self.scale, self.within)


@dataclass(frozen=True, eq=False)
class GroupedTarget:
    """Planes of groups of rows to write, all with one encoding.

    Attributes:
        planes: the planes of all groups.
        encoding: how the bytes are chosen.
        amax: see `Target`; those of all groups, one after the other.
        scale: see `Target`; those of all groups, one after the other.
        within: see `Target`; the same for all groups.
    """

    planes: PlaneGroups
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None
    within: Within | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the amax of the whole input."""
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> GroupedTarget:
        """The same target with amaxes."""
        return GroupedTarget(self.planes, self.encoding, amax, self.scale, self.within)

    def by_group(self) -> list[Target]:
        """The target of each group."""
        planes = self.planes.planes
        scales = [None] * len(planes) if self.scale is None else self.scale.split(1)
        amaxes = self.planes.amaxes(self.amax)
        each = zip(planes, amaxes, scales, strict=True)
        return [Target(plane, self.encoding, amax, scale, self.within) for plane, amax, scale in each]
