"""Tables from which the programs of one launch find their group of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...planes.groups import PlaneGroups
from ...runtime.host_and_device import on_device
from .device.encode import TABLE_COLUMNS


@dataclass(frozen=True, eq=False)
class GroupTable:
    """What programs need to know about groups.

    Attributes:
        tiles: number of tiles, one below the other, of all groups.
        tile_groups: int64 [2 · tiles]: the group of each tile, and its first row in the group.
        lines: int64 [groups · COLUMNS]: see `encode.TABLE_COLUMNS`.
        aligned: whether all offsets and strides of codes are multiples of 16 bytes.
    """

    COLUMNS: ClassVar[int] = TABLE_COLUMNS.value

    tiles: int
    tile_groups: Tensor
    lines: Tensor
    aligned: bool


def group_table(
    heights: tuple[int, ...],
    width: int,
    tile_rows: int,
    planes: Sequence[PlaneGroups | None],
    device: torch.device,
) -> GroupTable:
    """The table for groups of rows and a pair of planes. It is copied to the device without waiting for it."""
    tiles: list[int] = []
    for group, height in enumerate(heights):
        for first in range(0, max(height, 1), tile_rows):  # a group without rows has a scale and an amax all the same
            tiles += [group, first]
    lines: list[int] = []
    aligned = width % 16 == 0
    code_begins, scale_begins, row = [0, 0], [0, 0], 0
    for group, height in enumerate(heights):
        lines += [row, height]
        for at, of_direction in enumerate(planes):
            if of_direction is None:
                lines += [0] * 5
                continue
            plane = of_direction.planes[group]
            stride, scales = plane.operand_codes().stride(0 if plane.has_whole_rows else 1), plane.operand_scales()
            lines += [code_begins[at], scale_begins[at], stride, *scales.stride()]
            aligned = aligned and code_begins[at] % 16 == 0 and stride % 16 == 0
            code_begins[at] += plane.data.numel()
            assert plane.scale is not None
            scale_begins[at] += plane.scale.numel()
        row += height
    both = on_device([*tiles, *lines], device, torch.int64)
    return GroupTable(len(tiles) // 2, both[: len(tiles)], both[len(tiles) :], aligned)
