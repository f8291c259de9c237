"""The scale of a whole plane beside the scales of its blocks: GEMMs apply it to their results.

Per-tensor formats have only this scale. Two-level formats (NVFP4) have it as an amax, of the tensor or of each row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..planes import Plane


class GlobalScale(NamedTuple):
    """A scale for all numbers of an operand, or one for each of its rows. It is ``values * factor`` in float64.

    Attributes:
        values: float32 numbers: one, or one for each row of the operand.
        factor: what all of them are multiplied by.
    """

    values: Tensor
    factor: float

    @property
    def is_single(self) -> bool:
        """Whether it is one number."""
        return self.values.numel() == 1

    def wide(self) -> Tensor:
        """The scale in float64, as a vector."""
        return self.values.view(-1).to(torch.float64) * self.factor


def has_global_scale(fmt: Format) -> bool:
    """Whether planes of a format have a scale beside those of their blocks."""
    return fmt.element is not None and (fmt.block is None or fmt.global_amax is not None)


def global_scale(plane: Plane) -> GlobalScale | None:
    """The scale of a plane beside those of its blocks; None if it has none."""
    fmt = plane.format
    if not has_global_scale(fmt):
        return None
    if fmt.block is None:
        assert plane.scale is not None
        return GlobalScale(plane.scale, 1.0)
    assert plane.amax is not None
    return GlobalScale(plane.amax, 1.0 / neutral_amax(fmt))


def under_scale_one(plane: Plane) -> Plane:
    """The plane with its global scale replaced by one. A plane without one is returned as it is."""
    fmt = plane.format
    if fmt.element is None:
        return plane
    if fmt.block is None:
        assert plane.scale is not None
        return replace(plane, scale=torch.ones_like(plane.scale))
    if fmt.global_amax is None:
        return plane
    assert plane.amax is not None
    return replace(plane, amax=torch.full_like(plane.amax, neutral_amax(fmt)))


def neutral_amax(fmt: Format) -> float:
    """The amax of a two-level format for which the global scale is exactly one."""
    assert fmt.element is not None
    return fmt.element.max * fmt.scale_bound
