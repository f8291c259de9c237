"""The kernels that decode planes in their layout in memory.

What follows from the format and the shape is determined once: `decoder` is cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...formats import IDENTITY, Format
from ...planes import ROWWISE, Direction, Plane
from . import decode
from .known import E2M1
from .runtime import kernel
from .support import is_standard_format, scales_of, tag_of_dtype, tag_of_element, yes_or_no
from .tags import NO, Tag

Arguments = Callable[[Plane, int, int, int], tuple[Any, ...]]
"""The numbers that a kernel is given: for a plane, the address of the result, and a range of steps."""


class Decoder(NamedTuple):
    """How planes of one format and layout are decoded.

    Attributes:
        kernel: the kernel.
        arguments: its numbers.
        tags: its tags, but for the last: whether it writes past the caches.
        shape: the shape of the result: of the matrix, or of its transpose if the plane is stored so.
        steps: the number of steps: rows; numbers, if ``flat``.
        flat: whether a step is a number.
        versions: the machine code.
    """

    kernel: Any
    arguments: Arguments
    tags: tuple[Tag, ...]
    shape: tuple[int, int]
    steps: int
    flat: bool
    versions: _Versions

    def run(self, plane: Plane, out: int, first: int, last: int, past_caches: bool) -> None:
        """Decode a range of steps to the address ``out``, past the caches or not."""
        if self.flat:  # ranges of a result that is written past the caches begin at a cache line
            first, last = (at if at == self.steps else at // 64 * 64 for at in (first, last))
        self.versions[past_caches](*self.arguments(plane, out, first, last), *self.tags, NO)


class _Versions(dict[bool, Callable[..., object]]):
    """A kernel that writes past the caches (True) or not: each version is compiled when it is first needed.

    The last tag says which it is. Callers may pass any tag in its place, as tags are nothing at run time.
    """

    def __init__(self, dispatcher: object, arguments: Arguments, tags: Sequence[Tag]) -> None:
        self._of, self._arguments, self._tags = dispatcher, arguments, tags

    def __missing__(self, past_caches: bool) -> Callable[..., object]:
        one = torch.ones(1, device="cpu")
        numbers = self._arguments(Plane(IDENTITY, ROWWISE, (1, 1), one, one, one), 0, 0, 0)  # for their types
        self[past_caches] = kernel(self._of, *numbers, *self._tags, yes_or_no(past_caches))
        return self[past_caches]


_MOST_DECODERS = 4096
_decoders: dict[tuple[object, ...], tuple[Format, Decoder | None]] = {}  # by the address of the format, which is kept


def decoder(plane: Plane, dtype: torch.dtype) -> Decoder | None:
    """How to decode a plane to ``dtype``, float32 or bfloat16; None if there is no kernel for it."""
    scale = plane.scale
    if scale is None or not plane.data.is_contiguous() or not (plane.amax is None or plane.amax.is_contiguous()):
        return None
    key = (id(plane.format), plane.direction, plane.shape, plane.transposed, scale.stride(), dtype)
    found = _decoders.get(key)
    if found is None:
        if len(_decoders) >= _MOST_DECODERS:
            _decoders.clear()
        made = _made(plane.format, plane.direction, plane.shape, plane.transposed, scale.stride(), dtype)
        found = _decoders[key] = plane.format, made
    return found[1]


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
    out, element = tag_of_dtype(dtype), tag_of_element(fmt.element)
    which: Any
    arguments: Arguments
    tags: tuple[Tag, ...]
    if fmt.block is None:
        which, arguments, tags = decode.scaled, _per_tensor, (out, element)
    elif fmt.scale_rule in ("e8m0_up", "e8m0_floor") and fmt.block[1] == 32 and width % 32 == 0:
        by_rows = direction is ROWWISE or transposed
        which, tags = decode.mx_rows if by_rows else decode.mx_columns, (out, element)
        arguments = _mx(fmt, width, strides[0])
    elif fmt.scale_rule == "fp32" and fmt.block_length == 128:
        which, arguments, tags = decode.block_rows, _blocks(fmt, width, strides[0] * 4), (out, element)
    elif fmt.scale_rule == "two_level" and fmt.block_length == 16:
        which, arguments, tags = decode.nvfp4_rows, _nvfp4(fmt, width, strides[0]), (out,)
    else:
        return None
    versions, flat = _Versions(which, arguments, tags), fmt.block is None
    return Decoder(which, arguments, tags, result, height * width if flat else height, flat, versions)


def _per_tensor(plane: Plane, out: int, first: int, last: int) -> tuple[Any, ...]:
    return plane.data.data_ptr(), out, float(scales_of(plane)), first, last


def _mx(fmt: Format, width: int, scales_step: int) -> Arguments:
    assert fmt.element is not None
    codes_step = width * fmt.element.bits // 8

    def arguments(plane: Plane, out: int, first: int, last: int) -> tuple[Any, ...]:
        codes, scales = plane.data.data_ptr(), plane.scale.data_ptr()  # type: ignore[union-attr]
        return codes, codes_step, scales, scales_step, out, first, last, width

    return arguments


def _blocks(fmt: Format, width: int, scales_step: int) -> Arguments:
    steps = (scales_step, 4, 128) if fmt.block_rows == 128 else (4, scales_step, fmt.block_rows)

    def arguments(plane: Plane, out: int, first: int, last: int) -> tuple[Any, ...]:
        return plane.data.data_ptr(), width, scales_of(plane).data_ptr(), *steps, out, first, last, width

    return arguments


def _nvfp4(fmt: Format, width: int, scales_step: int) -> Arguments:
    amax_step = 4 if fmt.global_amax == "row" else 0
    constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))

    def arguments(plane: Plane, out: int, first: int, last: int) -> tuple[Any, ...]:
        assert plane.amax is not None
        return (
            plane.data.data_ptr(), width // 2, scales_of(plane).data_ptr(), scales_step, plane.amax.data_ptr(),
            amax_step, constant, out, first, last, width, _tables.mine().data_ptr(),
        )  # fmt: skip

    return arguments


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
