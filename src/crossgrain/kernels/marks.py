"""Mark NaNs and infinities of the input in planes whose codes do not show them.

Most formats lose some of them, by their definition: FP4 has no NaN and stores 6, FP8 stores its largest number for an
infinity. A mark is a NaN that the format does have: the NaN of the element, or else the NaN of the block's scale (E4M3
or E8M0), or else of the only scale. Whatever reads the plane gets NaN there: GEMMs, other ranks, checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import Format
from ..formats.element import E8M0
from ..planes import ROWWISE, Plane
from .choice import backend_for


def loses_nonfinite(fmt: Format) -> bool:
    """Whether a plane of this format may hold a number where its input has a NaN or an infinity."""
    if fmt.element is None:
        return False
    # Under the E8M0 scale of an infinity, 2**127, every code from 2 on is infinite in fp32.
    keeps_infinity = fmt.scale_rule.startswith("e8m0") and fmt.element.max >= 2.0
    return not (_has_nan(fmt) and keeps_infinity)


def mark_nonfinite(x: Tensor, plane: Plane) -> None:
    """Make the NaNs and infinities of ``x`` that ``plane`` does not show decode to NaN.

    Args:
        x: the matrix.
        plane: the plane that was encoded from it. With a mark in a scale, all numbers of its block are NaN.
    """
    if not loses_nonfinite(plane.format):
        return
    decoded = backend_for(plane.data.device.type).decode(plane, torch.float32)
    lost = decoded.isfinite() & ~x.reshape(plane.shape).isfinite()
    lost = lost if plane.direction is ROWWISE else lost.t()
    fmt = plane.format
    assert fmt.element is not None and plane.scale is not None
    if _has_nan(fmt) and fmt.element.bits == 8:
        plane.operand_codes().masked_fill_(lost, fmt.element.nan_code)
        return
    code = {"two_level": fmt.scale_element.nan_code, "fp32": math.nan}.get(fmt.scale_rule, E8M0.nan_code)
    if fmt.block is None:
        plane.scale.masked_fill_(lost.any(), code)
    else:
        plane.operand_scales().masked_fill_(_by_block(lost, fmt, plane.operand_scales().shape), code)


def _has_nan(fmt: Format) -> bool:
    assert fmt.element is not None
    return math.isnan(fmt.element.value(fmt.element.nan_code))


def _by_block(lost: Tensor, fmt: Format, grid: torch.Size) -> Tensor:
    """Whether anything is lost in each block, in the shape of the scales, where tiles may have a row for each row."""
    high, long = fmt.block_rows, fmt.block_length
    rows, columns = -(-lost.shape[0] // high), -(-lost.shape[1] // long)
    whole = torch.nn.functional.pad(lost, (0, columns * long - lost.shape[1], 0, rows * high - lost.shape[0]))
    blocks = whole.view(rows, high, columns, long).any(dim=3).any(dim=1)
    return blocks.repeat_interleave(high, dim=0)[: grid[0]] if fmt.layout.replicated else blocks
