"""Planes of groups of rows, which kernels write in one call.

The plane of each group is the same as for the group alone, including padding. There is one buffer for the codes of all
groups, one for their scales and one for their amaxes, so nothing is allocated or reduced group by group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..formats import Format
from .plane import COLUMNWISE, BufferShapes, Direction, Plane, buffer_shapes, scale_dtype


@dataclass(frozen=True, eq=False)
class PlaneGroups:
    """Planes of groups of rows, of one format and direction.

    Attributes:
        format: the format.
        direction: the direction.
        heights: number of rows of each group.
        width: number of columns.
        data: codes of all groups, flat.
        scale: scales of all groups, flat.
        amax: an amax for each group, or for each row of their operands; None if the format has none.
        transposed: see `Plane`.
    """

    format: Format
    direction: Direction
    heights: tuple[int, ...]
    width: int
    data: Tensor
    scale: Tensor
    amax: Tensor | None
    transposed: bool

    @cached_property
    def shapes(self) -> list[BufferShapes]:
        """The shapes of the buffers of each group."""
        return [buffer_shapes(self.format, self.direction, (m, self.width), self.transposed) for m in self.heights]

    @cached_property
    def planes(self) -> list[Plane]:
        """The plane of each group, as views of the buffers."""
        datas = self.data.split([math.prod(shape.data) for shape in self.shapes])
        scales = self.scale.split([math.prod(shape.scale) for shape in self.shapes])
        parts = zip(self.shapes, datas, scales, self.amaxes(self.amax), strict=True)
        kind, turned = (self.format, self.direction), self.transposed
        return [
            Plane(*kind, shape.matrix, data.view(shape.data), scale.view(shape.scale), amax, turned)
            for shape, data, scale, amax in parts
        ]

    def amaxes(self, amax: Tensor | None) -> Sequence[Tensor | None]:
        """The part of each group in a tensor with the amaxes of all groups."""
        if amax is None:
            return [None] * len(self.heights)
        return torch.split(amax, [1 if shape.amax is None else math.prod(shape.amax) for shape in self.shapes])


def empty_groups(
    fmt: Format,
    direction: Direction,
    heights: Sequence[int],
    width: int,
    *,
    device: torch.device,
    transposed: bool | None = None,
    scale: Tensor | None = None,
) -> PlaneGroups:
    """Allocate the planes of groups. Only the padding of scales is initialised, with zeros.

    Args:
        fmt: the format.
        direction: the direction.
        heights: number of rows of each group.
        width: number of columns.
        device: the device.
        transposed: see `Plane`; None for what the format says.
        scale: the scales of the other direction, if both directions share them.
    """
    if transposed is None:
        transposed = fmt.transposes and direction is COLUMNWISE
    shapes = [buffer_shapes(fmt, direction, (height, width), transposed) for height in heights]
    data = torch.empty(sum(math.prod(shape.data) for shape in shapes), dtype=torch.uint8, device=device)
    if scale is None:
        make = torch.zeros if any(shape.pads for shape in shapes) else torch.empty
        scale = make(sum(math.prod(shape.scale) for shape in shapes), dtype=scale_dtype(fmt), device=device)
    amax = None
    if fmt.global_amax is not None:
        amax = torch.empty(sum(math.prod(shape.amax or ()) for shape in shapes), dtype=torch.float32, device=device)
    return PlaneGroups(fmt, direction, tuple(heights), width, data, scale, amax, transposed)
