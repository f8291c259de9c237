"""What a quantizer has in common with those of other ranks: amaxes, and the tensor of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from ..kernels import GroupedTarget, Target
from .parts import Part


class AmaxReduction:
    """The part of a quantizer that says what it has in common with those of other ranks."""

    custom: ClassVar[bool] = False

    with_amax_reduction: bool = False
    amax_reduction_group: Any = None  # or a tuple of groups, over each of which amaxes are reduced
    amax_reduction_axis: int | None = None  # ranks hold parts of a tensor that was cut along it; None: they share all
    part: Part | None = None  # of which tensor it quantizes a part, if with the random numbers of the whole

    def copy(self) -> Self:
        raise NotImplementedError

    def leave_group(self) -> None:
        """Remove the process group: a tensor keeps its quantizer, and may exist longer than the group."""
        if self.with_amax_reduction or self.amax_reduction_group is not None:
            self.amax_reduction_group = None
            self.with_amax_reduction = False
            self.amax_reduction_axis = None
        if self.part is not None:
            self.part = None

    def _shares_amax(self, target: Target | GroupedTarget) -> bool:
        """Whether ranks share the amaxes of a target. An amax of a row belongs only to the rank that has the row."""
        axis = self.amax_reduction_axis
        planes = target.planes.planes if isinstance(target, GroupedTarget) else [target.plane]
        return axis is None or any(plane.scale_across((axis,)) is not None for plane in planes)

    def reducing(self, group: Any, *, axis: int, segments: Sequence[int] = ()) -> Self:
        """Return a quantizer for a part of a tensor: it quantizes the part as the whole tensor would be quantized.

        A quantizer that already is for a part is returned as it is. One that already reduces its amaxes still reduces
        them over its own group.

        Args:
            group: the process group whose ranks have the parts.
            axis: the axis along which the tensor was divided (0: rows, 1: columns).
            segments: see `Part`.
        """
        if self.custom or (self.part is not None and self.part.axis is not None):
            return self
        new = self.copy()
        new.part = Part(group, axis, tuple(segments))
        if not self.with_amax_reduction:
            new.with_amax_reduction, new.amax_reduction_group, new.amax_reduction_axis = True, group, axis
        return new

    def same_on(self, group: Any) -> Self:
        """Return a quantizer for a tensor that all ranks of ``group`` have: they round with the same random numbers."""
        if self.custom or not getattr(self, "stochastic_rounding", False):
            return self
        new = self.copy()
        new.part = Part(group, None)
        return new
