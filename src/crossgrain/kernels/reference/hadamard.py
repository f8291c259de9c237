"""The random Hadamard rotation of 16 numbers, which spreads outliers over a block.

Both operands of wgrad are multiplied by the same orthogonal matrix along the dimension that is summed, so the product
does not change. The matrix is ``diag(signs) @ H16 / 4``, with fixed signs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import HADAMARD_SIZE as SIZE
from .constants import constant


def signs(sign_mask: int, device: torch.device | None = None) -> Tensor:
    """The 16 signs as fp32 numbers, 1 or -1."""
    values = tuple(-1.0 if sign_mask >> i & 1 else 1.0 for i in range(SIZE))
    return constant(values, torch.float32, device or torch.get_default_device())


def rotation_matrix(sign_mask: int, device: torch.device | None = None) -> Tensor:
    """The orthogonal matrix [16, 16] that `rotate` multiplies by."""
    return rotate(torch.eye(SIZE, dtype=torch.float32, device=device), sign_mask)


def rotate(operand: Tensor, sign_mask: int) -> Tensor:
    """Multiply every 16 numbers along the last dimension of an fp32 operand [R, C] by the matrix."""
    groups = operand.reshape(-1, SIZE) * signs(sign_mask, operand.device)
    return (_butterfly(groups) * 0.25).view(operand.shape)


def unrotate(operand: Tensor, sign_mask: int) -> Tensor:
    """The inverse of `rotate`, up to fp32 rounding."""
    groups = _butterfly(operand.reshape(-1, SIZE)) * 0.25
    return (groups * signs(sign_mask, operand.device)).view(operand.shape)


def _butterfly(groups: Tensor) -> Tensor:
    """Sums and differences at distances 1, 2, 4, 8. The order is fixed, so that all backends give the same bits."""
    for distance in (1, 2, 4, 8):
        pairs = groups.reshape(-1, SIZE // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((low + high, low - high), dim=2).view(-1, SIZE)
    return groups
