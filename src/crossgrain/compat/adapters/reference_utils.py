"""Helpers of the reference quantizers."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from ...kernels.reference.packing import pack, unpack

__all__ = ["HIGH_PRECISION_FLOAT_DTYPES", "Fp4Formats", "pack_fp4", "roundup_div", "unpack_fp4"]

HIGH_PRECISION_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Fp4Formats(enum.Enum):
    """The 4-bit formats; there is only one."""

    E2M1 = "e2m1"


def roundup_div(x: int, y: int) -> int:
    return -(-x // y)


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack two codes into a byte, the first in the low half."""
    return pack(codes.reshape(-1, codes.shape[-1]), 4).view(*codes.shape[:-1], -1)


def unpack_fp4(packed: Tensor) -> Tensor:
    """The inverse of `pack_fp4`."""
    return unpack(packed.reshape(-1, packed.shape[-1]), 4).view(*packed.shape[:-1], -1)
