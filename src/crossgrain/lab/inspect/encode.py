"""Encode some rows of a tensor once more: with other random numbers, or in another format. Nothing that is in use is
written, and no random number of training is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...formats.encoding import Encoding
from ...kernels import Target
from ...linear.padding import padded_matrix
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane, round_up
from .sample import Sample


def padded_for(matrix: Tensor, encoding: Encoding, direction: Direction) -> Tensor:
    """The matrix with zeros added up to whole blocks, as a layer adds them."""
    fmt = encoding.format
    if fmt.block is None or fmt.ragged:
        return matrix
    along_m, along_k = fmt.block if direction is ROWWISE else fmt.block[::-1]
    return padded_matrix(matrix, round_up(matrix.shape[0], along_m), round_up(matrix.shape[1], along_k))


@dataclass(frozen=True, eq=False)
class Given:
    """The numbers beside the matrix that the bytes of a plane depend on: see `Target`."""

    amax: Tensor | None = None
    scale: Tensor | None = None

    def for_rows(self, sample: Sample, encoding: Encoding, direction: Direction) -> Given:
        """The same for some rows of the matrix: of amaxes for each row, those of the rows."""
        if self.amax is None or encoding.format.global_amax != "row" or direction is COLUMNWISE:
            return self
        return Given(sample.chosen(self.amax), self.scale)


def measured(matrix: Tensor, encoding: Encoding, direction: Direction, amax: float | None = None) -> Given:
    """Measure what a format needs to know of the whole matrix, which must have whole blocks.

    Args:
        matrix: the matrix.
        encoding: the encoding.
        direction: the direction of the plane.
        amax: the largest magnitude of the matrix, if it is known.
    """
    if not encoding.needs_amax:
        return Given()
    if amax is not None and encoding.format.rotation is None and encoding.format.global_amax != "row":
        return Given(torch.tensor([amax], dtype=torch.float32, device=matrix.device))
    plane = empty_plane(encoding.format, direction, matrix.shape, device=matrix.device)
    (target,) = kernels.measure(matrix, [Target(plane, encoding)])
    return Given(target.amax)


def encoded(matrix: Tensor, encoding: Encoding, direction: Direction, given: Given, seed: int = 0) -> Plane:
    """Encode a matrix of whole blocks to a new plane."""
    plane = empty_plane(encoding.format, direction, matrix.shape, device=matrix.device, dtype=matrix.dtype)
    kernels.encode(matrix, [Target(plane, encoding, given.amax, given.scale)], seed, checked=True)
    return plane
