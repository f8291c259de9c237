"""NVFP4 columnwise: codes [K, M / 2], transposed, perhaps rotated, perhaps with a rowwise plane on the way.

A tile is 128 rows high, so that a column of it fills a cache line of the transposed result: 8 blocks of
16 rows, 8 bytes each. They are collected in a buffer and written line by line.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from .elements import (
    E2M1_TAG,
    E4M3_TAG,
    INFINITY_BITS,
    at_most_fp32_max,
    bytes_of_codes,
    decode_element,
    encode_element,
    inner,
    input_size,
    kernel,
    load_input,
)
from .random_bits import encode_stochastically, hash_counters, lane_numbers
from .rows import block_length, encode_run
from .simd import as_float, largest, load, load_f32, maximum, splat, store
from .tags import F32, NO
from .tiles import amax_of_rows, load_rows, rotate_rows, scale_rows, store_column_bytes, store_columns


def rotated(rows, rotation):
    """Rows after the rotation that the tag names, if any."""


@overload(rotated)
def _rotated(rows, rotation):
    if rotation.tag == "none":
        return lambda rows, rotation: rows
    mask = int(rotation.tag)
    return lambda rows, rotation: rotate_rows(rows, mask)


def code(row, random_byte, element, stochastic):
    """Nearest or stochastic."""


@overload(code)
def _code(row, random_byte, element, stochastic):
    if stochastic.tag == "yes":
        return lambda row, random_byte, element, stochastic: encode_stochastically(row, random_byte, element)

    # Blocks with a NaN never come here, so the tag "no" says that as well.
    return lambda row, random_byte, element, stochastic: encode_element(row, element, stochastic)


@inner
def _word(a, b, c, d, e, f, g, h, random0, random1, element, stochastic):
    """Codes of 8 rows in one i32: row 0 in the lowest nibble. Four rows share a random word, a byte each."""
    return (
        code(a, random0 & 0xFF, element, stochastic)
        | (code(b, (random0 >> 8) & 0xFF, element, stochastic) << 4)
        | (code(c, (random0 >> 16) & 0xFF, element, stochastic) << 8)
        | (code(d, random0 >> 24, element, stochastic) << 12)
        | (code(e, random1 & 0xFF, element, stochastic) << 16)
        | (code(f, (random1 >> 8) & 0xFF, element, stochastic) << 20)
        | (code(g, (random1 >> 16) & 0xFF, element, stochastic) << 24)
        | (code(h, random1 >> 24, element, stochastic) << 28)
    )


def random_words(row, col, cols, key0, key1, lanes, stochastic):
    """Random words of rows ``row`` to ``row + 3``; nothing where rounding is to nearest."""


@overload(random_words, prefer_literal=True)
def _random_words(row, col, cols, key0, key1, lanes, stochastic):
    if stochastic.tag == "yes":

        def draw(row, col, cols, key0, key1, lanes, stochastic):
            return hash_counters(lane_numbers(lanes) + ((row // 4) * cols + col), key0, key1)

        return draw
    return lambda row, col, cols, key0, key1, lanes, stochastic: splat(0, lanes, "i32")


@inner
def _block(
    buffer, stride, codes, scales, encode_scale, decode_scale, top, col, cols, key0, key1,
    rotation, stochastic, square,
):  # fmt: skip
    """16 rows of 16 columns: 8 bytes of codes and a scale for each column, 64 and 8 bytes apart.

    ``square``: the 16x16 tile shares one scale.
    """
    rows = rotated(load_rows(buffer, stride, 16, F32), rotation)
    amax = amax_of_rows(rows)
    worst = largest(amax)
    if worst > INFINITY_BITS:
        return False
    if square:
        amax = splat(worst, 16, "i32")
    stored = encode_element(at_most_fp32_max(as_float(amax) * encode_scale), E4M3_TAG, NO)
    unit = splat(np.float32(1.0), 16, "f32")
    factor = at_most_fp32_max(unit / (decode_element(stored, E4M3_TAG) * decode_scale))
    r = scale_rows(rows, factor)
    r0 = random_words(top, col, cols, key0, key1, 16, stochastic)
    r1 = random_words(top + 4, col, cols, key0, key1, 16, stochastic)
    r2 = random_words(top + 8, col, cols, key0, key1, 16, stochastic)
    r3 = random_words(top + 12, col, cols, key0, key1, 16, stochastic)
    low = _word(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r0, r1, E2M1_TAG, stochastic)
    high = _word(r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15], r2, r3, E2M1_TAG, stochastic)
    store_columns(codes, 64, low, high)
    store_column_bytes(scales, 8, stored)
    return True


@kernel
def columns(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scale, decode_scale,
    row_codes, row_codes_stride, row_scales, row_scales_stride, row_encode_scales, row_decode_scales, row_scale_step,
    first, last, height, cols, width, scratch, key0, key1, row_key0, row_key1,
    square, dtype, rotation, stochastic, row_element, row_rule, row_stochastic,
):  # fmt: skip
    """Tiles ``first:last`` of 128 rows, with a rowwise plane of ``row_rule`` in the same pass.

    ``scratch`` is (16 * 4 + 64 + 8) * width bytes and what a run needs. The row plane is told about as in
    `encode_rows`.

    Returns False as soon as a NaN is met (of the input, or made by the rotation): then the caller starts
    again with the reference.
    """
    size = input_size(dtype)
    lines, bytes_ = scratch + 16 * width * 4, scratch + (16 * 4 + 64) * width
    run_scratch = scratch + (16 * 4 + 64 + 8) * width
    for tile in range(first, last):
        top = tile * 128
        groups = min(8, (height - top) // 16)
        start = 0
        while start < cols:
            left = min(start, cols - width)  # the last strip may overlap the one before
            for group in range(groups):
                for row in range(16):
                    at = top + group * 16 + row
                    source = x + at * x_stride + left * size
                    position = 0
                    while position < width:
                        col = min(position, width - 32)
                        store(scratch + (row * width + col) * 4, load_input(source + col * size, 32, dtype))
                        position += 32
                    encode_run(
                        source, width,
                        row_codes + at * row_codes_stride + bytes_of_codes(left, row_element),
                        row_scales + at * row_scales_stride + left // block_length(row_rule),
                        load_f32(row_encode_scales + at * row_scale_step),
                        load_f32(row_decode_scales + at * row_scale_step),
                        run_scratch, (at * cols + left) // 4, 1, row_key0, row_key1,
                        dtype, row_element, row_rule, row_stochastic,
                    )  # fmt: skip
                position = 0
                while position < width:
                    col = min(position, width - 16)
                    fine = _block(
                        scratch + col * 4, width * 4, lines + col * 64 + group * 8, bytes_ + col * 8 + group,
                        encode_scale, decode_scale, top + group * 16, left + col, cols, key0, key1,
                        rotation, stochastic, square,
                    )  # fmt: skip
                    if not fine:
                        return False
                    position += 16
            for col in range(width):
                target = codes + (left + col) * codes_stride + tile * 64
                scale = scales + (left + col) * scales_stride + tile * 8
                if groups == 8:
                    store(target, load(lines + col * 64, 64, "u8"))
                    store(scale, load(bytes_ + col * 8, 8, "u8"))
                else:
                    for group in range(groups):
                        store(target + group * 8, load(lines + col * 64 + group * 8, 8, "u8"))
                        store(scale + group, load(bytes_ + col * 8 + group, 1, "u8"))
            start += width
    return True


@kernel
def rotated_amax(x, x_stride, first, last, cols, scratch, dtype, rotation):
    """Bits of the largest rotated magnitude of strips ``first:last`` of 16 rows; above Inf's at a NaN."""
    size = input_size(dtype)
    worst = 0
    for strip in range(first, last):
        start = 0
        best = splat(0, 16, "i32")
        while start < cols:
            col = min(start, cols - 16)
            for row in range(16):
                v = load_input(x + (strip * 16 + row) * x_stride + col * size, 16, dtype)
                store(scratch + row * 64, v)
            best = maximum(best, amax_of_rows(rotated(load_rows(scratch, 64, 16, F32), rotation)))
            start += 16
        worst = max(worst, largest(best))
        if worst > INFINITY_BITS:
            return worst
    return worst
