"""`Target` and `GroupedTarget`: planes that kernels write, and how."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Plane
from ..planes.groups import PlaneGroups


@dataclass(frozen=True, eq=False)
class Target:
    """A plane to write, and how to choose its bytes.

    Attributes:
        plane: the plane.
        encoding: how the bytes are chosen.
        amax: the global amax, which was measured before, and perhaps reduced over ranks.
        scale: for per-tensor formats: a given scale to multiply with (delayed scaling).
    """

    plane: Plane
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the amax of the whole input."""
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> Target:
        """The same target with an amax."""
        return Target(self.plane, self.encoding, amax, self.scale)


@dataclass(frozen=True, eq=False)
class GroupedTarget:
    """Planes of groups of rows to write, all with one encoding.

    Attributes:
        planes: the planes of all groups.
        encoding: how the bytes are chosen.
        amax: see `Target`; those of all groups, one after the other.
        scale: see `Target`; those of all groups, one after the other.
    """

    planes: PlaneGroups
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the amax of the whole input."""
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> GroupedTarget:
        """The same target with amaxes."""
        return GroupedTarget(self.planes, self.encoding, amax, self.scale)

    def by_group(self) -> list[Target]:
        """The target of each group."""
        planes = self.planes.planes
        scales = [None] * len(planes) if self.scale is None else self.scale.split(1)
        amaxes = self.planes.amaxes(self.amax)
        return [Target(plane, self.encoding, a, s) for plane, a, s in zip(planes, amaxes, scales, strict=True)]
