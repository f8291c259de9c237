"""Amaxes that ranks have in common: the scale of a tensor of which each rank has a part."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

import torch

from ..kernels import GroupedTarget, Target
from ..runtime.collectives import maximise_

AnyTarget = TypeVar("AnyTarget", Target, GroupedTarget)


class AmaxReduction:
    """The part of a quantizer that measured amaxes go through before they scale anything."""

    custom: ClassVar[bool] = False

    with_amax_reduction: bool = False
    amax_reduction_group: Any = None  # or a tuple of groups, over each of which amaxes are reduced
    amax_reduction_axis: int | None = None  # ranks hold parts of a tensor that was cut along it; None: they share all

    def copy(self) -> Self:
        raise NotImplementedError

    def _observe(self, targets: Any) -> None:
        raise NotImplementedError

    def leave_group(self) -> None:
        """Remove the process group: a tensor keeps its quantizer, and may exist longer than the group."""
        if self.with_amax_reduction or self.amax_reduction_group is not None:
            self.amax_reduction_group = None
            self.with_amax_reduction = False
            self.amax_reduction_axis = None

    def _settled(self, targets: list[Target]) -> list[Target]:
        """Measured targets with amaxes that are reduced over ranks and recorded."""
        targets = self._reduced(targets)
        self._observe(targets)
        return targets

    def _reduced(self, targets: list[AnyTarget]) -> list[AnyTarget]:
        """Targets with the largest amaxes over the reduction group, in one collective."""
        if not self.with_amax_reduction:
            return targets
        shared = [self._shares_amax(target) for target in targets]
        amaxes = [
            target.amax for target, share in zip(targets, shared, strict=True) if share and target.amax is not None
        ]
        if not amaxes:
            return targets
        packed = torch.cat(amaxes)
        maximise_(packed, self.amax_reduction_group)
        pieces = iter(packed.split([amax.numel() for amax in amaxes]))
        return [
            target.with_amax(next(pieces)) if share and target.amax is not None else target
            for target, share in zip(targets, shared, strict=True)
        ]

    def _shares_amax(self, target: Target | GroupedTarget) -> bool:
        """Whether ranks share the amaxes of a target. An amax of a row belongs only to the rank that has the row."""
        axis = self.amax_reduction_axis
        planes = target.planes.planes if isinstance(target, GroupedTarget) else [target.plane]
        return axis is None or any(plane.scale_across((axis,)) is not None for plane in planes)

    def reducing(self, group: Any, *, axis: int) -> Self:
        """Return a quantizer for a part of a tensor: it quantizes the part as the whole tensor would be quantized.

        A quantizer that already reduces its amaxes is returned as it is.

        Args:
            group: the process group whose ranks have the parts.
            axis: the axis along which the tensor was divided (0: rows, 1: columns).
        """
        if self.custom or self.with_amax_reduction:
            return self
        new = self.copy()
        new.with_amax_reduction, new.amax_reduction_group, new.amax_reduction_axis = True, group, axis
        return new
