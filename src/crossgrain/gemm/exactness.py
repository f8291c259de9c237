"""Which formats bf16 holds exactly, so that their operands can be multiplied in bf16.

The numbers of an operand are codes times the scales of their blocks; the scale of the whole tensor multiplies the
result (`kernels.global_scale`). Whether all such numbers are bf16 numbers follows from the format alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..formats import Format

_SMALLEST_NORMAL = 2.0**-126  # of bf16 and of fp32


@lru_cache(maxsize=256)
def exact_in_bf16(fmt: Format, *, subnormals: bool = True) -> bool:
    """Whether every number of an operand is a bf16 number: at most 8 significant bits, in the range of bf16.

    Infinities count as exact: what is beyond bf16 with 8 significant bits is also beyond fp32.

    Args:
        fmt: the format, which is not identity.
        subnormals: also look at numbers below 2**-126. The smallest numbers of MXFP8 (2**-136) are too small for bf16,
            so MXFP8 is exact only without them.
    """
    assert fmt.element is not None
    scales = _block_scales(fmt)
    if scales is None:
        return False
    codes = torch.tensor(fmt.element.values(), dtype=torch.float64)
    numbers = (codes[codes.isfinite()].view(-1, 1) * scales).view(-1)
    if not subnormals:
        numbers = numbers[numbers.abs() >= _SMALLEST_NORMAL]
    rounded = numbers.to(torch.bfloat16).to(torch.float64)
    return bool(((rounded == numbers) | numbers.to(torch.float32).isinf()).all())


def _block_scales(fmt: Format) -> Tensor | None:
    """The scales of blocks that decide: all of them, or the extremes of powers of two. None if they can be anything."""
    if fmt.block is None:
        return torch.ones(1, dtype=torch.float64)
    if fmt.scale_rule in ("e8m0_up", "e8m0_floor"):
        return torch.tensor([2.0**-127, 1.0, 2.0**127], dtype=torch.float64)
    if fmt.scale_rule == "two_level":
        scales = torch.tensor(fmt.scale_element.values(), dtype=torch.float64)
        return scales[scales.isfinite()]
    return None  # fp32 scales
