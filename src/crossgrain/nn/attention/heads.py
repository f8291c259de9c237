"""Quantize a batch of matrices, one per head, as one matrix.

The heads are stacked below each other. Each is padded with zeros to whole blocks, so that no block has numbers of two
heads. A format with one scale per tensor has one scale for all heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import kernels
from ...linear.padding import known_format
from ...linear.saved_planes import Operand
from ...planes import COLUMNWISE, ROWWISE, Plane, round_up
from ...quantizers.base import Quantizer
from ...tensor import QuantizedTensorStorage


def quantized_heads(x: Tensor, quantizer: Quantizer, *, rowwise: bool, columnwise: bool) -> QuantizedTensorStorage:
    """Quantize ``x`` [batch, heads, R, C] as one matrix, in the given directions."""
    rows, columns = _whole_blocks(quantizer, x.shape[-2], x.shape[-1])
    x = torch.nn.functional.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))
    made: QuantizedTensorStorage = quantizer.storing(rowwise=rowwise, columnwise=columnwise).quantize(
        x.reshape(-1, columns)
    )
    return made


def decoded_heads(operand: Operand | None, shape: torch.Size) -> Tensor:
    """Decode a plane of `quantized_heads` to fp32 of ``shape`` [batch, heads, R, C]."""
    assert operand is not None
    if not isinstance(operand, Plane):
        return operand.to(torch.float32)
    values = kernels.decode(operand, torch.float32)
    heads = values.view(shape[0], shape[1], -1, values.shape[-1])
    return heads[:, :, : shape[2], : shape[3]]


def _whole_blocks(quantizer: Quantizer, rows: int, columns: int) -> tuple[int, int]:
    """The padded sizes of a head. Other heads follow below it, but nothing to its right."""
    row_multiple = column_multiple = 1
    for direction in (ROWWISE, COLUMNWISE):
        fmt = known_format(quantizer, direction)
        if fmt is None or fmt.block is None:
            continue
        down, right = (fmt.block_rows, fmt.block_length) if direction is ROWWISE else (fmt.block_length, fmt.block_rows)
        row_multiple = math.lcm(row_multiple, down)
        column_multiple = math.lcm(column_multiple, 1 if fmt.ragged else right)
    return round_up(rows, row_multiple), round_up(columns, column_multiple)
