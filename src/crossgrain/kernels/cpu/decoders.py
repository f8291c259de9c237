"""The kernels that decode planes in their layout in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from . import decode
from .known import E2M1
from .runtime import kernel
from .support import row_bytes, scales_of, tag_of_input, tag_of_plane
from .tags import Tag

Decoder = Callable[[Tensor, int, int, Tag], None]


def decoder(plane: Plane, width: int) -> Decoder | None:
    """A function that decodes rows ``first:last`` of a plane (numbers, without blocks); None if there is no kernel."""
    fmt = plane.format
    if fmt.block is None:
        factor = float(scales_of(plane).item())

        def per_tensor(out: Tensor, first: int, last: int, streaming: Tag) -> None:
            # Ranges of a result that is written past the caches begin at a cache line.
            first, last = (at if at == out.numel() else at // 64 * 64 for at in (first, last))
            arguments = (
                plane.data.data_ptr(), out.data_ptr(), factor, first, last,
                tag_of_input(out), tag_of_plane(plane), streaming,
            )  # fmt: skip
            kernel(decode.scaled, *arguments)(*arguments)

        return per_tensor
    if fmt.scale_rule in ("e8m0_up", "e8m0_floor") and fmt.block[1] == 32 and width % 32 == 0:
        which = decode.mx_rows if plane.direction is ROWWISE or plane.transposed else decode.mx_columns
        row_of_codes = plane.data.numel() * width // max(plane.shape[0] * plane.shape[1], 1)
        scales, element = plane.scale, tag_of_plane(plane)
        assert scales is not None

        def mx(out: Tensor, first: int, last: int, streaming: Tag) -> None:
            arguments = (
                plane.data.data_ptr(), row_of_codes, scales.data_ptr(), scales.stride(0),
                out.data_ptr(), first, last, width, tag_of_input(out), element, streaming,
            )  # fmt: skip
            kernel(which, *arguments)(*arguments)

        return mx
    if fmt.scale_rule == "fp32" and fmt.block_length == 128:
        row_step, block_step = 4, row_bytes(scales_of(plane))
        if fmt.block_rows == 128:
            row_step, block_step = block_step, row_step

        def blocks(out: Tensor, first: int, last: int, streaming: Tag) -> None:
            arguments = (
                plane.data.data_ptr(), width, scales_of(plane).data_ptr(), row_step, block_step, fmt.block_rows,
                out.data_ptr(), first, last, width, tag_of_input(out), tag_of_plane(plane), streaming,
            )  # fmt: skip
            kernel(decode.block_rows, *arguments)(*arguments)

        return blocks
    if fmt.scale_rule == "two_level" and fmt.block_length == 16:
        amax = plane.amax
        assert amax is not None
        constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))

        def nvfp4(out: Tensor, first: int, last: int, streaming: Tag) -> None:
            table = _tables.mine()
            arguments = (
                plane.data.data_ptr(), width // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                amax.data_ptr(), 4 if fmt.global_amax == "row" else 0, constant,
                out.data_ptr(), first, last, width, table.data_ptr(), tag_of_input(out), streaming,
            )  # fmt: skip
            kernel(decode.nvfp4_rows, *arguments)(*arguments)

        return nvfp4
    return None


class _Tables(threading.local):
    """Scratch memory of the NVFP4 decoder for each thread: 256 numbers, then the bytes 0 to 255."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def mine(self) -> Tensor:
        if self.table is None:
            with torch.inference_mode(False):
                table = torch.empty(320, dtype=torch.float32, device="cpu")
                table.view(torch.uint8)[1024:] = torch.arange(256, dtype=torch.uint8, device="cpu")
            self.table = table  # only now, when it is complete: an interrupt may come at any time
        return self.table


_tables = _Tables()
