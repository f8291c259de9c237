"""Quantize tensors apart from what a recipe does: to look at the result, or to multiply it in high precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...formats import Format, formats, get_format
from ...formats.dtypes import DType
from ...linear.padding import padded_matrix
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane, matrix_shape, round_up
from ...quantizers.base import Quantizer
from ...quantizers.by_format import quantizer_of
from ...quantizers.float8 import Float8CurrentScalingQuantizer, Float8Tensor
from ...quantizers.nonfinite import Policy

QUANT_FORMATS = {
    "FP8E4M3": "fp8",
    "FP8E5M2": "fp8_e5m2",
    "MXFP8E4M3": "mxfp8",
    "MXFP8E5M2": "mxfp8_e5m2",
    "FP8_BLOCKWISE_E4M3": "fp8_block_2d",
    "FP8_BLOCKWISE_E5M2": "fp8_block_2d_e5m2",
    "FP8_BLOCKWISE_1D_E4M3": "fp8_block",
    "FP8_BLOCKWISE_1D_E5M2": "fp8_block_e5m2",
}
"""Transformer Engine's names of formats. Blocks are along rows, in whichever direction a GEMM reads the tensor."""


def check_quant_format(name: Any, margin: int = 0) -> None:
    """Raise ValueError if there is no format of this name, or if it has no scale that a margin could change."""
    known = (*QUANT_FORMATS, *(fmt.name for fmt in formats() if not fmt.is_identity))
    if name not in known:
        raise ValueError(f"there is no quant_format {name!r}; there are {', '.join(known)}")
    if margin and get_format(QUANT_FORMATS.get(name, name)).block is not None:
        raise ValueError(f"margin is only for formats with one scale for the whole tensor, not for {name}")


def fake_quantize(
    tensor: Tensor,
    quant_format: str,
    direction: Direction = ROWWISE,
    *,
    margin: int = 0,
    nonfinite: Policy | None = None,
) -> Tensor:
    """Quantize and decode a tensor.

    Args:
        tensor: the tensor; its last dimension is that of rows.
        quant_format: one of `QUANT_FORMATS`, or the name of a format of crossgrain.
        direction: the direction in which a GEMM reads the tensor. Only formats of crossgrain's names look at it.
        margin: the scale of a per-tensor format is that of an amax 2^margin times as large.
        nonfinite: what to do about NaNs and infinities; None for what `settings` say.

    Returns:
        The decoded numbers, in the shape and dtype of ``tensor``.
    """
    check_quant_format(quant_format, margin)
    if quant_format in QUANT_FORMATS:
        direction = ROWWISE
    fmt = get_format(QUANT_FORMATS.get(quant_format, quant_format))
    quantizer = _with_margin(fmt, tensor, margin) if margin else quantizer_of(fmt)
    quantizer.nonfinite = nonfinite
    matrix = tensor.detach().reshape(matrix_shape(tensor.shape))
    decoded = kernels.decode(plane_of(matrix, quantizer, direction), tensor.dtype)
    return decoded[: matrix.shape[0], : matrix.shape[1]].reshape(tensor.shape)


def plane_of(matrix: Tensor, quantizer: Quantizer, direction: Direction) -> Plane:
    """The plane that a quantizer makes of a matrix, which is padded with zeros to whole blocks."""
    fmt = quantizer.encoding(direction).format
    if fmt.block is not None and not fmt.ragged:
        tall, wide = (fmt.block_rows, fmt.block_length) if direction is ROWWISE else (fmt.block_length, fmt.block_rows)
        matrix = padded_matrix(matrix, round_up(matrix.shape[0], tall), round_up(matrix.shape[1], wide))
    made = quantizer.make_planes(matrix, rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE)
    plane = made.plane(direction)
    assert plane is not None
    return plane


def per_tensor_cast(tensor: Tensor, dtype: DType, *, margin: int = 0, nonfinite: Policy | None = None) -> Float8Tensor:
    """Quantize a tensor to FP8 with current scaling.

    Args:
        tensor: the tensor.
        dtype: FP8 type of the codes.
        margin: the scale is that of an amax 2^margin times as large.
        nonfinite: what to do about NaNs and infinities; None for what `settings` say.
    """
    quantizer = _current_scaling(tensor, dtype, margin)
    quantizer.nonfinite = nonfinite
    made: Float8Tensor = quantizer(tensor.detach())
    return made


def _current_scaling(tensor: Tensor, dtype: DType, margin: int) -> Float8CurrentScalingQuantizer:
    if not margin:
        return Float8CurrentScalingQuantizer(dtype, tensor.device)
    amax = (kernels.amax(tensor.detach()).to(torch.float32) * 2.0**margin).view(1)
    return Float8CurrentScalingQuantizer(dtype, tensor.device, use_existing_amax=True, amax=amax)


def _with_margin(fmt: Format, tensor: Tensor, margin: int) -> Quantizer:
    plain = quantizer_of(fmt)
    if not isinstance(plain, Float8CurrentScalingQuantizer):
        raise ValueError(f"margin is only for FP8 with one scale for the whole tensor, not for {fmt.name}")
    return _current_scaling(tensor, plain.dtype, margin)
