"""The planes of groups of rows, which kernels write in one call.

Each is the plane that the format makes of its group alone, padding and all. They lie one after the other in
one memory for each kind of buffer, so nothing is allocated, filled or reduced group by group.
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
    """Planes [height, width] of one format and direction; buffers are flat.

    ``amax``  of each group, or, where every row of an operand has one, of their rows
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
        """Of the buffers of each group."""
        return [buffer_shapes(self.format, self.direction, (m, self.width), self.transposed) for m in self.heights]

    @cached_property
    def planes(self) -> list[Plane]:
        """The plane of each group: views."""
        datas = self.data.split([math.prod(shape.data) for shape in self.shapes])
        scales = self.scale.split([math.prod(shape.scale) for shape in self.shapes])
        parts = zip(self.shapes, datas, scales, self.amaxes(self.amax), strict=True)
        kind, turned = (self.format, self.direction), self.transposed
        return [
            Plane(*kind, shape.matrix, data.view(shape.data), scale.view(shape.scale), amax, turned)
            for shape, data, scale, amax in parts
        ]

    def amaxes(self, amax: Tensor | None) -> Sequence[Tensor | None]:
        """The share of each group in amaxes of all."""
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
    """As `empty_plane`, of groups. ``scale`` is that of the other direction where they share one."""
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
