"""What a kernel is asked to fill."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Plane
from ..planes.groups import PlaneGroups


@dataclass(frozen=True, eq=False)
class Target:
    """A plane to write and how to choose its bytes.

    ``amax``   the global amax, measured before (and perhaps reduced over ranks)
    ``scale``  per-tensor formats: the encode scale, when it comes from outside (delayed scaling)
    """

    plane: Plane
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None

    @property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the largest magnitude of the whole input."""
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> Target:
        return Target(self.plane, self.encoding, amax, self.scale)


@dataclass(frozen=True, eq=False)
class GroupedTarget:
    """Planes of groups of rows to write, all by one encoding.

    ``amax``, ``scale``  as in `Target`, of the groups one after the other
    """

    planes: PlaneGroups
    encoding: Encoding
    amax: Tensor | None = None
    scale: Tensor | None = None

    @property
    def needs_amax(self) -> bool:
        return self.encoding.needs_amax

    def with_amax(self, amax: Tensor | None) -> GroupedTarget:
        return GroupedTarget(self.planes, self.encoding, amax, self.scale)

    def by_group(self) -> list[Target]:
        """The target of each group."""
        planes = self.planes.planes
        scales = [None] * len(planes) if self.scale is None else self.scale.split(1)
        amaxes = self.planes.amaxes(self.amax)
        return [Target(plane, self.encoding, a, s) for plane, a, s in zip(planes, amaxes, scales, strict=True)]
