"""The kernels that decode planes in their layout in memory.

What follows from the format and the shape is determined once: `decoder` is cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...formats import Format
from ...planes import ROWWISE, Direction, Plane
from . import decode
from .known import E2M1
from .runtime import kernel
from .support import is_standard_format, tag_of_dtype, tag_of_element, yes_or_no
from .tags import NO

Decode = Callable[[Plane, int, int, int, bool], None]
"""Decodes a range of a plane: the plane, the address of the result, first, last, whether to write past the caches."""


class Decoder(NamedTuple):
    """How planes of one format and layout are decoded.

    Attributes:
        shape: the shape of the result: of the matrix, or of its transpose if the plane is stored so.
        steps: the number of steps of ``run``: rows; numbers, without blocks.
        run: decodes a range of steps.
        format: the format. Its address is in the key of the cache, so it is kept alive here.
    """

    shape: tuple[int, int]
    steps: int
    run: Decode
    format: Format


_MOST_DECODERS = 4096
_decoders: dict[tuple[object, ...], Decoder | None] = {}


def decoder(plane: Plane, dtype: torch.dtype) -> Decoder | None:
    """How to decode a plane to ``dtype``, float32 or bfloat16; None if there is no kernel for it."""
    scale = plane.scale
    if scale is None or not plane.data.is_contiguous() or not (plane.amax is None or plane.amax.is_contiguous()):
        return None
    key = (id(plane.format), plane.direction, plane.shape, plane.transposed, scale.stride(), dtype)
    if key not in _decoders:
        if len(_decoders) >= _MOST_DECODERS:
            _decoders.clear()
        _decoders[key] = _made(plane.format, plane.direction, plane.shape, plane.transposed, scale.stride(), dtype)
    return _decoders[key]


def _made(
    fmt: Format,
    direction: Direction,
    shape: tuple[int, int],
    transposed: bool,
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Decoder | None:
    if not is_standard_format(fmt, direction, transposed) or (fmt.block is not None and strides[-1] != 1):
        return None
    height, width = result = shape[::-1] if transposed else shape
    if fmt.block is None:
        return Decoder(result, height * width, _per_tensor(fmt, height * width, dtype), fmt)
    run = None
    if fmt.scale_rule in ("e8m0_up", "e8m0_floor") and fmt.block[1] == 32 and width % 32 == 0:
        run = _mx(fmt, width, strides[0], direction is ROWWISE or transposed, dtype)
    elif fmt.scale_rule == "fp32" and fmt.block_length == 128:
        run = _blocks(fmt, width, strides[0] * 4, dtype)
    elif fmt.scale_rule == "two_level" and fmt.block_length == 16:
        run = _nvfp4(fmt, width, strides[0], dtype)
    return None if run is None else Decoder(result, height, run, fmt)


class _Versions(dict[bool, Callable[..., object]]):
    """A kernel that writes past the caches (True) or not: each version is compiled when it is first needed.

    The last tag says which it is. Callers may pass any tag in its place, as tags are nothing at run time.
    """

    def __init__(self, dispatcher: object, *arguments: object) -> None:
        self._compile = partial(kernel, dispatcher, *arguments)

    def __missing__(self, past_caches: bool) -> Callable[..., object]:
        self[past_caches] = self._compile(yes_or_no(past_caches))
        return self[past_caches]


def _per_tensor(fmt: Format, count: int, dtype: torch.dtype) -> Decode:
    tags = tag_of_dtype(dtype), tag_of_element(fmt.element)
    versions = _Versions(decode.scaled, 0, 0, 0.0, 0, 0, *tags)

    def run(plane: Plane, out: int, first: int, last: int, past_caches: bool) -> None:
        assert plane.scale is not None
        factor = float(plane.scale)
        # Ranges of a result that is written past the caches begin at a cache line.
        first, last = (at if at == count else at // 64 * 64 for at in (first, last))
        versions[past_caches](plane.data.data_ptr(), out, factor, first, last, *tags, NO)

    return run


def _mx(fmt: Format, width: int, scales_step: int, by_rows: bool, dtype: torch.dtype) -> Decode:
    assert fmt.element is not None
    which, codes_step = decode.mx_rows if by_rows else decode.mx_columns, width * fmt.element.bits // 8
    tags = tag_of_dtype(dtype), tag_of_element(fmt.element)
    versions = _Versions(which, *[0] * 8, *tags)

    def run(plane: Plane, out: int, first: int, last: int, past_caches: bool) -> None:
        assert plane.scale is not None
        codes, scales = plane.data.data_ptr(), plane.scale.data_ptr()
        versions[past_caches](codes, codes_step, scales, scales_step, out, first, last, width, *tags, NO)

    return run


def _blocks(fmt: Format, width: int, scales_step: int, dtype: torch.dtype) -> Decode:
    row_step, block_step = (scales_step, 4) if fmt.block_rows == 128 else (4, scales_step)
    tags = tag_of_dtype(dtype), tag_of_element(fmt.element)
    versions = _Versions(decode.block_rows, *[0] * 10, *tags)

    def run(plane: Plane, out: int, first: int, last: int, past_caches: bool) -> None:
        assert plane.scale is not None
        codes, scales = plane.data.data_ptr(), plane.scale.data_ptr()
        steps = row_step, block_step, fmt.block_rows
        versions[past_caches](codes, width, scales, *steps, out, first, last, width, *tags, NO)

    return run


def _nvfp4(fmt: Format, width: int, scales_step: int, dtype: torch.dtype) -> Decode:
    amax_step = 4 if fmt.global_amax == "row" else 0
    constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))
    tag = tag_of_dtype(dtype)
    versions = _Versions(decode.nvfp4_rows, *[0] * 6, 0.0, *[0] * 5, tag)

    def run(plane: Plane, out: int, first: int, last: int, past_caches: bool) -> None:
        assert plane.scale is not None and plane.amax is not None
        versions[past_caches](
            plane.data.data_ptr(), width // 2, plane.scale.data_ptr(), scales_step, plane.amax.data_ptr(), amax_step,
            constant, out, first, last, width, _tables.mine().data_ptr(), tag, NO,
        )  # fmt: skip

    return run


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
