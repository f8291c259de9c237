"""The product of two NVFP4 planes from their codes: pack both into panels, then multiply tile by tile.

``table`` holds half the value of each of the 256 block scales. Rows beyond the last one are packed as zeros, and what
comes of them is dropped. Every number is summed in the same order, wherever its tile lies.
"""

from __future__ import annotations

import numpy as np

from .compiling import inner, kernel
from .dot_tile import (
    LEFT_BLOCK_BYTES,
    OFFSET,
    RIGHT_BLOCK_BYTES,
    RIGHT_CODES_BYTES,
    START_MASK,
    TILE_COLUMNS,
    TILE_ROWS,
    multiply_tile,
)
from .packing import unpack_nibbles
from .simd import (
    as_words,
    load,
    load_i32,
    load_u8,
    maximum,
    narrow,
    splat,
    store,
    store_apart,
    store_i32,
    total_of,
    where_greater,
)


@inner
def _twice(codes):
    """Twice the E2M1 numbers of 16 codes, as integers: 0, 1, 2, 3, 4, 6, 8, 12, and negative."""
    magnitude = codes & 7
    doublings = maximum(magnitude >> 1, 1) - 1
    value = where_greater(magnitude, 1, ((magnitude & 1) | 2) << doublings, magnitude)
    return where_greater(codes, 7, splat(0, 16, "i32") - value, value)


@inner
def _numbers(codes, codes_stride, row, block):
    """Of one block, as `_twice` makes them."""
    return _twice(unpack_nibbles(load(codes + row * codes_stride + 8 * block, 8, "u8")))


@inner
def _store_scale(address, scales, scales_stride, row, block, table):
    store_i32(address, load_i32(table + 4 * load_u8(scales + row * scales_stride + block)))


@kernel
def pack_left(codes, codes_stride, scales, scales_stride, table, out, first, last, rows, blocks, tag):
    """Tiles ``first:last`` of rows."""
    for tile in range(first, last):
        for block in range(blocks):
            panel = out + (tile * blocks + block) * LEFT_BLOCK_BYTES
            for place in range(TILE_ROWS):
                row = tile * TILE_ROWS + place
                starts = panel + 16 * TILE_ROWS + 4 * place
                if row < rows:
                    numbers = _numbers(codes, codes_stride, row, block)
                    store(panel + 16 * place, narrow(numbers))
                    store_i32(starts, (-OFFSET * total_of(numbers)) & START_MASK)
                    _store_scale(starts + 4 * TILE_ROWS, scales, scales_stride, row, block, table)
                else:
                    store(panel + 16 * place, splat(0, 4, "i32"))
                    store_i32(starts, 0)
                    store_i32(starts + 4 * TILE_ROWS, 0)
    return np.int64(0)


@kernel
def pack_right(codes, codes_stride, scales, scales_stride, table, out, first, last, rows, blocks, tag):
    """Tiles ``first:last`` of rows, which are the columns of the product."""
    for tile in range(first, last):
        for block in range(blocks):
            panel = out + (tile * blocks + block) * RIGHT_BLOCK_BYTES
            for place in range(TILE_COLUMNS):
                row = tile * TILE_COLUMNS + place
                at = panel + 4 * place
                if row < rows:
                    numbers = _numbers(codes, codes_stride, row, block) + OFFSET
                    store_apart(at, 4 * TILE_COLUMNS, as_words(narrow(numbers)))
                    _store_scale(at + RIGHT_CODES_BYTES, scales, scales_stride, row, block, table)
                else:
                    store_apart(at, 4 * TILE_COLUMNS, splat(0, 4, "i32"))
                    store_i32(at + RIGHT_CODES_BYTES, 0)
    return np.int64(0)


@kernel
def multiply(left, right, out, out_stride, first, last, rows, columns, blocks, group, factor, scratch, tag):
    """Columns of the product by tiles ``first:last``; ``scratch`` holds a tile that reaches over the edge.

    Rows go in groups whose panels stay in the cache while all of the right operand passes by.
    """
    for start in range(0, rows, group):
        for tile in range(first, last):
            for top in range(start, min(start + group, rows), TILE_ROWS):
                _multiply_one(left, right, out, out_stride, tile, top, rows, columns, blocks, factor, scratch)
    return np.int64(0)


@inner
def _multiply_one(left, right, out, out_stride, tile, top, rows, columns, blocks, factor, scratch):
    row_panel = left + top * blocks * (LEFT_BLOCK_BYTES // TILE_ROWS)
    column_panel = right + tile * blocks * RIGHT_BLOCK_BYTES
    here = out + top * out_stride + tile * TILE_COLUMNS * 4
    height, width = min(TILE_ROWS, rows - top), min(TILE_COLUMNS, columns - tile * TILE_COLUMNS)
    if height == TILE_ROWS and width == TILE_COLUMNS:
        multiply_tile(row_panel, column_panel, blocks, here, out_stride, factor)
        return
    multiply_tile(row_panel, column_panel, blocks, scratch, TILE_COLUMNS * 4, factor)
    for row in range(height):
        for column in range(width):
            value = load_i32(scratch + (row * TILE_COLUMNS + column) * 4)
            store_i32(here + row * out_stride + column * 4, value)
