"""Divide an operand [R, C] into blocks, and repeat one number per block for all its elements."""

from __future__ import annotations

import torch
from torch import Tensor

from ...planes import round_up
from .strips import number_strips


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of ``x`` as fp32 [1]. NaNs are ignored; an empty tensor gives 0."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    found = [_magnitudes(strip).amax().to(torch.float32).view(1) for strip in number_strips(x)]
    return found[0] if len(found) == 1 else torch.cat(found).amax().view(1)


def row_amax(operand: Tensor) -> Tensor:
    """The largest magnitude of each row, as fp32 [R]."""
    if operand.numel() == 0:
        return torch.zeros(operand.shape[0], dtype=torch.float32, device=operand.device)
    return _magnitudes(operand).amax(dim=1).to(torch.float32)


def block_amax(operand: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block: [R, C] -> [ceil(R / rows), ceil(C / length)]."""
    return blocked(_magnitudes(operand), block).amax(dim=(1, 3))


def blocked(operand: Tensor, block: tuple[int, int]) -> Tensor:
    """Divide into blocks: [R, C] -> [R / rows, rows, C / length, length]. Partial blocks are padded with zeros."""
    rows, length = block
    padded_rows, padded_length = (round_up(n, b) for n, b in zip(operand.shape, block, strict=True))
    padding = (0, padded_length - operand.shape[1], 0, padded_rows - operand.shape[0])
    if any(padding):
        operand = torch.nn.functional.pad(operand, padding)
    return operand.reshape(padded_rows // rows, rows, padded_length // length, length)


def spread(per_block: Tensor, block: tuple[int, int], operand_shape: tuple[int, int]) -> Tensor:
    """Repeat one number per block for all its elements: [R / rows, C / length] -> [R, C]."""
    rows, length = block
    full = per_block.repeat_interleave(rows, dim=0).repeat_interleave(length, dim=1)
    return full[: operand_shape[0], : operand_shape[1]]


def _magnitudes(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())
