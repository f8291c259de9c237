"""Pack codes of 4 and 6 bits into bytes. The first code is in the lowest bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes: [R, C] codes of ``bits`` bits -> [R, C * bits / 8] bytes."""
    if bits == 8:
        return codes
    per_group = math.lcm(bits, 8) // bits  # 2 codes in 1 byte, 4 six-bit codes in 3 bytes
    rows, length = codes.shape
    group = codes.view(rows, length // per_group, per_group).to(torch.int32)
    word = (group << (bits * torch.arange(per_group, device=codes.device, dtype=torch.int32))).sum(-1)
    bytes_per_group = per_group * bits // 8
    shifts = 8 * torch.arange(bytes_per_group, device=codes.device)
    packed = (word.unsqueeze(-1) >> shifts) & 0xFF
    return packed.to(torch.uint8).view(rows, length * bits // 8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes: [R, B] bytes -> [R, B * 8 / bits] codes; the inverse of `pack`."""
    if bits == 8:
        return packed
    bytes_per_group = math.lcm(bits, 8) // 8
    rows, length = packed.shape
    group = packed.reshape(rows, length // bytes_per_group, bytes_per_group).to(torch.int32)
    word = (group << (8 * torch.arange(bytes_per_group, device=packed.device, dtype=torch.int32))).sum(-1)
    shifts = bits * torch.arange(bytes_per_group * 8 // bits, device=packed.device)
    codes = (word.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(rows, length * 8 // bits)
