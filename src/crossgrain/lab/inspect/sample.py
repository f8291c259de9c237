"""Some rows of a matrix, and of the planes that were made from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.encoding import Encoding
from ...planes import ROWWISE, Direction, Plane, empty_plane

_FEWEST = 32  # rows that are looked at together, in whole blocks


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows of a matrix.

    Attributes:
        whole: the matrix.
        numbers: the rows.
        unit: the rows are pieces of so many.
        pieces: the indices of the pieces; empty if all rows are in the sample.
    """

    whole: Tensor
    numbers: Tensor
    unit: int = 1
    pieces: Sequence[int] = ()

    def chosen(self, per_row: Tensor) -> Tensor:
        """Of a tensor with an entry for each row of the matrix, those of the rows of the sample."""
        if not self.pieces:
            return per_row
        return torch.cat([per_row[piece * self.unit : (piece + 1) * self.unit] for piece in self.pieces])

    def plane(self, plane: Plane) -> Plane:
        """A plane of the rows, with the bytes that a plane of the whole matrix has for them."""
        if not self.pieces:
            return plane
        fmt, rowwise = plane.format, plane.direction is ROWWISE
        if fmt.is_identity:
            chosen = self.chosen(plane.data.reshape(plane.shape))
            return Plane(fmt, plane.direction, (chosen.shape[0], chosen.shape[1]), chosen)
        assert fmt.element is not None
        shape = (len(self.numbers), plane.shape[1])
        own = empty_plane(fmt, plane.direction, shape, device=plane.data.device, transposed=plane.transposed)
        packed = rowwise or not plane.transposed
        step = self.unit if packed else self.unit * fmt.element.bits // 8  # codes are packed along the operand
        axis = 0 if rowwise else 1
        _copy(plane.operand_codes(), own.operand_codes(), axis, step, self.pieces)
        if fmt.block is not None:
            high = (1 if fmt.layout.replicated else fmt.block_rows) if rowwise else fmt.block_length
            _copy(plane.operand_scales(), own.operand_scales(), axis, self.unit // high, self.pieces)
        else:
            assert own.scale is not None and plane.scale is not None
            own.scale.copy_(plane.scale.view(own.scale.shape))
        if own.amax is not None and plane.amax is not None:
            of_rows = fmt.global_amax == "row" and rowwise
            own.amax.copy_(self.chosen(plane.amax) if of_rows else plane.amax)
        return own


def _copy(source: Tensor, to: Tensor, axis: int, step: int, pieces: Sequence[int]) -> None:
    """Copy pieces of ``step`` entries along an axis."""
    for at, piece in enumerate(pieces):
        to.narrow(axis, at * step, step).copy_(source.narrow(axis, piece * step, step))


def sample_of(matrix: Tensor, rows: int | None, encodings: Iterable[tuple[Encoding, Direction]] = ()) -> Sample:
    """Choose rows: pieces of whole blocks, evenly spread.

    Args:
        matrix: the matrix.
        rows: the number of rows, which may be one block more; None for all rows.
        encodings: the encodings whose blocks must be whole.
    """
    unit = math.lcm(_FEWEST, *(_height(encoding, direction) for encoding, direction in encodings))
    height = matrix.shape[0]
    if rows is None or height <= max(rows, unit):
        return Sample(matrix, matrix)
    count, wanted = height // unit, max(1, rows // unit)
    pieces = [round(at * (count - 1) / max(1, wanted - 1)) for at in range(wanted)]
    numbers = torch.cat([matrix[piece * unit : (piece + 1) * unit] for piece in pieces])
    return Sample(matrix, numbers, unit, pieces)


def _height(encoding: Encoding, direction: Direction) -> int:
    """The rows of the matrix that a block spans."""
    fmt = encoding.format
    return fmt.block_rows if direction is ROWWISE else fmt.block_length
