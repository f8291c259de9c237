"""How planes that are stored transposed are decoded to matrices [M, K]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...planes import Plane
from . import turned
from .known import E2M1
from .runtime import kernel
from .support import is_standard, row_bytes, scratch, tag, tag_of_plane


def turned_decoder(plane: Plane) -> Callable[[Tensor, int, int, bool], None] | None:
    """A function that decodes tiles ``first:last`` of 128 rows of the matrix, any rotation undone.

    It writes past the caches, or not. None if kernels cannot read the plane.
    """
    scales, fmt = plane.scale, plane.format
    if scales is None or not plane.data.is_contiguous() or not is_standard(plane):
        return None
    if fmt.block is not None and scales.stride(-1) != 1:
        return None
    height, width = plane.shape
    bits = 8 if fmt.element is None else fmt.element.bits
    # From row to row of the operand, from block to block along a row; rows that share a scale.
    row_step, block_step, tile_rows = row_bytes(scales), 1, 1
    if fmt.block is None:
        row_step, block_step = 0, 0
    elif fmt.block_rows == 128:
        row_step, block_step, tile_rows = row_step, 4, 128
    elif fmt.block_length == 128:
        row_step, block_step = 4, row_step
    amax, amax_step, constant = scales, 0, 1.0
    if plane.amax is not None:
        amax, amax_step = plane.amax, 4 if fmt.global_amax == "row" else 0
        constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))
    tags = (tag_of_plane(plane), tag(fmt.scale_rule), tag("none" if fmt.rotation is None else str(fmt.rotation)))

    def turn(out: Tensor, first: int, last: int, past_caches: bool) -> None:
        memory = scratch(turned.SCRATCH)  # held: a signal's handler may make this thread need more
        arguments = (
            plane.data.data_ptr(), height * bits // 8, scales.data_ptr(), row_step, block_step, tile_rows,
            amax.data_ptr(), amax_step, constant, out.data_ptr(), first, last, height, width,
            memory.data_ptr(), out.dtype == torch.bfloat16, past_caches, *tags,
        )  # fmt: skip
        kernel(turned.decode_turned, *arguments)(*arguments)

    return turn
