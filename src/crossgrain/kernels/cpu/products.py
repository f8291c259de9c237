"""Which planes can be multiplied without decoding, and how the kernels for that are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ...formats import Format
from ...planes import ROWWISE, Direction, Plane
from ..workspaces import workspace
from . import nvfp4_product, runtime
from .dot_tile import AVAILABLE, LEFT_BLOCK_BYTES, RIGHT_BLOCK_BYTES, TILE_COLUMNS, TILE_ROWS
from .runtime import kernel, run_ranges
from .support import is_standard_format, plane_has_memory, scratch, tag_of_plane
from .tags import Tag

# By which the types of the arguments of kernels are known.
_MULTIPLY_NUMBERS = (*[0] * 10, 0.0, 0)
_PACK_NUMBERS = (0,) * 10

_CACHE_BYTES = 3 << 18  # part of the cache of a core that is used for rows which are multiplied by all columns


def can_multiply(a: Plane, b: Plane) -> bool:
    """Whether two NVFP4 planes can be multiplied: same rotation, suitable layout, a CPU that multiplies bytes."""
    return a.format.rotation == b.format.rotation and _is_packable(a) and _is_packable(b) and has_byte_dot_products()


def _is_packable(plane: Plane) -> bool:
    """Whether codes and scales are stored along the rows of the operand."""
    key = id(plane.format), plane.direction, plane.transposed
    known = _packable.get(key)
    if known is None:
        if len(_packable) >= _MOST_PACKABLE:
            _packable.clear()
        suits = is_standard_format(plane.format, *key[1:]) and (plane.direction is ROWWISE or plane.transposed)
        known = _packable[key] = plane.format, suits
    return (
        known[1]
        and plane.data.is_contiguous()
        and plane.scale is not None
        and plane.scale.stride(-1) == 1
        and (plane.amax is None or plane.amax.is_contiguous())
        and plane_has_memory(plane)
    )


_MOST_PACKABLE = 1024
_packable: dict[tuple[int, Direction, bool], tuple[Format, bool]] = {}
"""Whether planes are stored so, by the address of their format, which is faster than its hash. Formats are kept."""


def has_byte_dot_products() -> bool:
    """Whether kernels are compiled for AVX-512 BW or AVX2: those of this CPU, or of the one numba is configured for."""
    return AVAILABLE


def multiply(a: Plane, b: Plane, out: Tensor, factor: float) -> None:
    """Compute ``out`` [rows of a, rows of b] = ``factor`` · a · bᵀ with block scales. The caller applies the amaxes."""
    (rows, inner), columns = a.operand_shape, b.operand_shape[0]
    blocks, tag = inner // 16, tag_of_plane(a)
    left = _packed(nvfp4_product.pack_left, a, TILE_ROWS, LEFT_BLOCK_BYTES, "gemm.a", tag)
    right = _packed(nvfp4_product.pack_right, b, TILE_COLUMNS, RIGHT_BLOCK_BYTES, "gemm.b", tag)

    group = rows_together(blocks)
    entry = _entries.get((nvfp4_product.multiply, tag.name)) or _entry(nvfp4_product.multiply, _MULTIPLY_NUMBERS, tag)

    def work(first: int, last: int) -> None:
        memory = scratch(TILE_ROWS * TILE_COLUMNS * 4)  # held: a signal's handler may make this thread need more
        entry(
            left.data_ptr(), right.data_ptr(), out.data_ptr(), out.stride(0) * 4, first, last, rows, columns,
            blocks, group, factor, memory.data_ptr(), tag,
        )  # fmt: skip

    steps, numbers = -(-columns // TILE_COLUMNS), size_of(a, b)
    if numbers < 2 * runtime.ELEMENTS_PER_THREAD:
        work(0, steps)
    else:
        run_ranges(work, steps, numbers)


def size_of(a: Plane, b: Plane) -> int:
    """The size of a product, by which the number of threads is chosen: the number of products of blocks."""
    (rows, inner), columns = a.operand_shape, b.operand_shape[0]
    return rows * columns * (inner // 16)


def rows_together(blocks: int) -> int:
    """How many rows of the left operand are multiplied by all columns, one group of rows after the other."""
    return max(1, _CACHE_BYTES // (blocks * LEFT_BLOCK_BYTES)) * TILE_ROWS


def _packed(pack: object, plane: Plane, tile_rows: int, block_bytes: int, name: str, tag: Tag) -> Tensor:
    """An operand, packed into panels in a workspace."""
    rows, inner = plane.operand_shape
    tiles, blocks, scales = -(-rows // tile_rows), inner // 16, plane.scale
    assert scales is not None
    size = -(-tiles * blocks * block_bytes // 4)
    panels = workspace(name, size)
    if panels is None:
        panels = torch.empty(size, dtype=torch.float32, device="cpu")

    entry = _entries.get((pack, tag.name)) or _entry(pack, _PACK_NUMBERS, tag)

    def work(first: int, last: int) -> None:
        entry(
            plane.data.data_ptr(), inner // 2, scales.data_ptr(), scales.stride(0), scale_values().data_ptr(),
            panels.data_ptr(), first, last, rows, blocks, tag,
        )  # fmt: skip

    if rows * inner < 2 * runtime.ELEMENTS_PER_THREAD:
        work(0, tiles)
    else:
        run_ranges(work, tiles, rows * inner)
    return panels


_entries: dict[tuple[object, str], Callable[..., object]] = {}  # the machine code of kernels by their tag


def _entry(dispatcher: object, numbers: tuple[int | float, ...], tag: Tag) -> Callable[..., object]:
    found = _entries[dispatcher, tag.name] = kernel(dispatcher, *numbers, tag)
    return found


@lru_cache
def scale_values() -> Tensor:
    """Half of the value of each of the 256 block scales, because panels have twice the numbers, as integers."""
    with torch.inference_mode(False):
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        return codes.view(torch.float8_e4m3fn).to(torch.float32) * 0.5
