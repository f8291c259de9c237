"""Padding of the sizes of a linear layer to whole blocks. It is computed once for its quantizers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..planes import COLUMNWISE, ROWWISE, Direction, round_up
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer


class Sizes(NamedTuple):
    """The sizes of x [M, K], W [N, K] and dy [M, N]."""

    m: int
    k: int
    n: int


class Padding(NamedTuple):
    """The multiples to which sizes are padded. Without a backward pass M needs less.

    K and N are always the same, because one quantized weight is used in many calls.
    """

    m_forward: int
    m_backward: int
    k: int
    n: int

    def padded(self, sizes: Sizes, *, backward: bool) -> Sizes:
        """The sizes with padding."""
        if self == NO_PADDING:
            return sizes
        m = self.m_backward if backward else self.m_forward
        return Sizes(round_up(sizes.m, m), round_up(sizes.k, self.k), round_up(sizes.n, self.n))


NO_PADDING = Padding(1, 1, 1, 1)


def padding_for(x: Quantizer, weight: Quantizer, grad_output: Quantizer | None) -> Padding:
    """The padding of a layer with these quantizers. Without one for gradients, backward does not quantize."""
    forward = {"m": 1, "k": 1, "n": 1}
    _ask(forward, x, ROWWISE, "m", "k")
    _ask(forward, weight, ROWWISE, "n", "k")
    backward = dict(forward)
    if grad_output is not None:
        _ask(backward, x, COLUMNWISE, "m", "k")
        _ask(backward, weight, COLUMNWISE, "n", "k")
        _ask(backward, grad_output, ROWWISE, "m", "n")
        _ask(backward, grad_output, COLUMNWISE, "m", "n")
    return Padding(forward["m"], backward["m"], backward["k"], backward["n"])


def known_format(quantizer: Quantizer, direction: Direction) -> Format | None:
    """The format that a quantizer makes in a direction; None for custom quantizers, which may have none."""
    if isinstance(quantizer, HybridQuantizer):
        quantizer = quantizer.child(direction)
    return None if quantizer.custom else quantizer.encoding(direction).format


def _ask(multiples: dict[str, int], quantizer: Quantizer, direction: Direction, rows: str, columns: str) -> None:
    fmt = known_format(quantizer, direction)
    if fmt is None or fmt.block is None or fmt.ragged:
        return
    summed, other = (columns, rows) if direction is ROWWISE else (rows, columns)
    multiples[summed] = math.lcm(multiples[summed], fmt.block_length)
    multiples[other] = math.lcm(multiples[other], fmt.block_rows)


def padded_matrix(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` with zeros added below and to the right."""
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def padded_vector(vector: Tensor | None, size: int) -> Tensor | None:
    """``vector`` with zeros added at the end."""
    if vector is None or vector.shape[0] == size:
        return vector
    return torch.nn.functional.pad(vector, (0, size - vector.shape[0]))
