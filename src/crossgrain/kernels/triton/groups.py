"""Tables from which the programs of one launch find their group of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import Format
from ...planes import ROWWISE, Direction
from ...planes.groups import PlaneGroups
from ...planes.plane import buffer_shapes
from ...runtime.host_and_device import on_device


@dataclass(frozen=True, eq=False)
class GroupTable:
    """What programs need to know about groups.

    Attributes:
        tiles: number of tiles, one below the other, of all groups.
        tile_groups: int64 [2 · tiles]: the group of each tile, and its first row in the group.
        lines: int64, a line for each group: see `device.tiles.TABLE_COLUMNS`.
        aligned: whether all offsets and strides of codes are multiples of 16 bytes.
    """

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
    kinds = tuple(each and _Kind(each.format, each.direction, each.transposed) for each in planes)
    tiles, lines, aligned = _numbers(heights, width, tile_rows, kinds)
    both = on_device([*tiles, *lines], device, torch.int64)
    return GroupTable(len(tiles) // 2, both[: len(tiles)], both[len(tiles) :], aligned)


class _Kind(NamedTuple):
    """What the places of codes and scales depend on, beside the sizes."""

    format: Format
    direction: Direction
    transposed: bool


class _Numbers(NamedTuple):
    """The numbers of a table, see `GroupTable`."""

    tiles: list[int]
    lines: list[int]
    aligned: bool


@lru_cache(maxsize=64)  # the kernels of one layer ask for the same table
def _numbers(heights: tuple[int, ...], width: int, tile_rows: int, kinds: tuple[_Kind | None, ...]) -> _Numbers:
    tiles: list[int] = []
    for group, height in enumerate(heights):
        for first in range(0, max(height, 1), tile_rows):  # a group without rows has a scale and an amax all the same
            tiles += [group, first]
    lines: list[int] = []
    aligned = width % 16 == 0
    codes, scales, row = [0, 0], [0, 0], 0
    for height in heights:
        lines += [row, height]
        for at, kind in enumerate(kinds):
            if kind is None:
                lines += [0] * 5
                continue
            sizes = buffer_shapes(kind.format, kind.direction, (height, width), kind.transposed)
            stride = sizes.data[-1]
            lines += [codes[at], scales[at], stride, *_scale_strides(kind, sizes.scale)]
            aligned = aligned and codes[at] % 16 == 0 and stride % 16 == 0
            codes[at] += math.prod(sizes.data)
            scales[at] += math.prod(sizes.scale)
        row += height
    return _Numbers(tiles, lines, aligned)


def _scale_strides(kind: _Kind, shape: tuple[int, ...]) -> tuple[int, int]:
    """How far the scales of neighbouring rows of blocks, and of neighbouring blocks of a row, are apart."""
    if kind.format.block is None:
        return 1, 1
    operand_major = kind.direction is ROWWISE or kind.transposed
    return (shape[1], 1) if operand_major != kind.format.layout.transposed else (1, shape[1])
