"""Mark NaNs and infinities in planes that do not show them: the definition, in plain torch. See `kernels.marks`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...formats import Format
from ...formats.element import E8M0
from ...planes import ROWWISE, Plane


def mark(x: Tensor, plane: Plane, decoded: Tensor) -> None:
    """Make numbers of ``plane`` NaN where ``x`` is not finite, and ``decoded``, which is [M, K], is."""
    lost = decoded.isfinite() & ~x.reshape(plane.shape).isfinite()
    lost = lost if plane.direction is ROWWISE else lost.t()
    fmt = plane.format
    assert fmt.element is not None and plane.scale is not None
    if has_nan(fmt) and fmt.element.bits == 8:
        plane.operand_codes().masked_fill_(lost, fmt.element.nan_code)
    elif fmt.block is None:
        plane.scale.masked_fill_(lost.any(), nan_scale(fmt))
    else:
        plane.operand_scales().masked_fill_(_by_block(lost, fmt, plane.operand_scales().shape), nan_scale(fmt))


def loses_nonfinite(fmt: Format) -> bool:
    """Whether a plane of this format may hold a number where its input has a NaN or an infinity."""
    if fmt.element is None:
        return False
    # Under the E8M0 scale of an infinity, 2**127, every code from 2 on is infinite in fp32.
    keeps_infinity = fmt.scale_rule.startswith("e8m0") and fmt.element.max >= 2.0
    return not (has_nan(fmt) and keeps_infinity)


def has_nan(fmt: Format) -> bool:
    """Whether the element of a format has a code for NaN."""
    assert fmt.element is not None
    return math.isnan(fmt.element.value(fmt.element.nan_code))


def nan_scale(fmt: Format) -> float:
    """What is stored as the scale of a block of NaNs."""
    return {"two_level": fmt.scale_element.nan_code, "fp32": math.nan}.get(fmt.scale_rule, E8M0.nan_code)


def _by_block(lost: Tensor, fmt: Format, grid: torch.Size) -> Tensor:
    """Whether anything is lost in each block, in the shape of the scales, where tiles may have a row for each row."""
    high, long = fmt.block_rows, fmt.block_length
    rows, columns = -(-lost.shape[0] // high), -(-lost.shape[1] // long)
    whole = torch.nn.functional.pad(lost, (0, columns * long - lost.shape[1], 0, rows * high - lost.shape[0]))
    blocks = whole.view(rows, high, columns, long).any(dim=3).any(dim=1)
    return blocks.repeat_interleave(high, dim=0)[: grid[0]] if fmt.layout.replicated else blocks
