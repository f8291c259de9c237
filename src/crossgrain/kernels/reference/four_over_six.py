"""4-over-6: quantize every NVFP4 block twice, and keep the better result.

The usual block scale maps the amax of the block to 6, the largest number of E2M1. There is no number between 4 and 6.
The other scale maps it to 4, where numbers are closer. Each block uses the scale with the smaller error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.encoding import Encoding
from .blocks import block_amax, blocked, spread
from .elements import element_values, round_to_nearest
from .scaling import GlobalScale, block_scales, divided, global_scale


def encode_four_over_six(operand: Tensor, encoding: Encoding, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and stored block scales. ``amax`` is the global amax, [1, 1] or [R, 1]."""
    scale = global_scale(amax, encoding.format)
    to_six = _candidate(operand, encoding, amax, scale, stretch=1.0)
    to_four = _candidate(operand, encoding, amax, scale, stretch=1.5)
    assert encoding.format.block is not None
    take_four = to_four[2] < to_six[2]
    take_four_each = spread(take_four, encoding.format.block, _shape(operand))
    return torch.where(take_four_each, to_four[0], to_six[0]), torch.where(take_four, to_four[1], to_six[1])


def _candidate(
    operand: Tensor, encoding: Encoding, amax: Tensor, scale: GlobalScale, stretch: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, stored scales and the error of each block, with block scales that are multiplied by ``stretch``."""
    fmt = encoding.format
    assert fmt.element is not None and fmt.block is not None
    wanted = divided(block_amax(operand, fmt.block), fmt.element.max) * scale.encode
    stored, factor = block_scales((wanted * stretch).clamp(max=fmt.scale_element.max), scale, fmt.scale_element)
    codes = round_to_nearest(operand * spread(factor, fmt.block, _shape(operand)), fmt.element)

    scales = element_values(stored, fmt.scale_element)
    decoded = element_values(codes, fmt.element) * spread(scales, fmt.block, _shape(operand))
    difference = divided(decoded * amax, fmt.element.max * fmt.scale_bound) - operand
    error = difference.abs() if encoding.four_over_six == "MAE" else difference * difference
    return codes, stored, _sum_per_block(blocked(error, fmt.block))


def _sum_per_block(error: Tensor) -> Tensor:
    """Sum over blocks: [R / rows, rows, C / length, length] -> [R / rows, C / length], in the order of hardware.

    Numbers of a row are added one after the other, the rows of a tile by halves.
    """
    total = torch.zeros_like(error[..., 0])
    for i in range(error.shape[-1]):
        total = total + error[..., i]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _shape(operand: Tensor) -> tuple[int, int]:
    return operand.shape[0], operand.shape[1]
