"""Divide work into strips of rows of an operand, so that the memory for what is in between does not grow with it.

The steps of the reference need several times the memory of their input, some of them in int64. Rows of blocks are
independent of each other, so a strip of whole blocks has the bytes that it has in the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from ...planes.slicing import slice_plane
from ..target import Target, Within

MOST_NUMBERS = 1 << 22
"""Numbers of a strip, unless one row of blocks is longer."""


def row_ranges(plane: Plane) -> Iterator[tuple[int, int]]:
    """Ranges of rows of the operand, of whole blocks."""
    rows, length = plane.operand_shape
    high = plane.format.block_rows
    step = max(MOST_NUMBERS // max(length, 1) // high, 1) * high
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def target_strips(x: Tensor, target: Target) -> Iterator[tuple[Tensor, Target]]:
    """Strips of a matrix, and of a target for it. The planes of the strips have the memory of the plane."""
    plane = target.plane
    if x.numel() <= MOST_NUMBERS:
        yield x, target
        return
    matrix, rowwise = x.reshape(plane.shape), plane.direction is ROWWISE
    top, left, width = target.within or Within(0, 0, plane.shape[1])
    for start, end in row_ranges(plane):
        amax = target.amax
        if plane.format.global_amax == "row" and amax is not None and amax.numel() > 1:
            amax = amax.view(-1)[start:end]
        yield (
            matrix[start:end] if rowwise else matrix[:, start:end],
            replace(
                target,
                plane=plane_strip(plane, start, end),
                amax=amax,
                within=Within(top + start, left, width) if rowwise else Within(top, left + start, width),
            ),
        )


def plane_strip(plane: Plane, start: int, end: int) -> Plane:
    """Rows of the operand of a plane, as a plane with the same memory."""
    rowwise = plane.direction is ROWWISE
    flat = plane if plane.data.dim() == 2 else replace(plane, data=_as_matrix(plane))
    return slice_plane(flat, plane.shape, 0 if rowwise else 1, start, end, ragged_end=True)


def _as_matrix(plane: Plane) -> Tensor:
    codes = plane.operand_codes()
    return codes if plane.direction is ROWWISE or plane.transposed else codes.t()


def number_strips(x: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor in strips, in any order."""
    if x.numel() <= MOST_NUMBERS or not x.dim():
        return (x,)
    rows = x.reshape(-1, x.shape[-1])
    return torch.split(rows, max(MOST_NUMBERS // rows.shape[1], 1))
