"""FP8 in tiles of 128x128: block scales of a row piece, a column piece or the tile, or one for the tensor.

A tile is read into a buffer once. Row codes come from it as they lie; column codes are stored transposed,
eight rows at a time: the codes of eight rows in one column are eight bytes of the result.
"""

from __future__ import annotations

import numpy as np

from .compiling import inner, kernel, overloaded
from .elements import INFINITY_BITS, encode_element, input_size, load_input, magnitude_bits
from .simd import (
    as_float,
    as_int,
    bits_of,
    largest,
    load,
    load_f32,
    maximum,
    narrow,
    splat,
    store,
    store_i32,
    where_greater,
)
from .tags import NO, YES
from .tiles import store_columns

SIDE = 128
ONE_BITS = 0x3F800000

# Scratch of a thread: the tile, row codes, column codes, then six vectors of 128 floats.
CODES = SIDE * SIDE * 4
COLUMN_CODES = CODES + SIDE * SIDE
ROW_AMAX = COLUMN_CODES + SIDE * SIDE
COLUMN_AMAX = ROW_AMAX + SIDE * 4
ROW_FACTORS = COLUMN_AMAX + SIDE * 4
COLUMN_FACTORS = ROW_FACTORS + SIDE * 4
ROW_SCALES = COLUMN_FACTORS + SIDE * 4
COLUMN_SCALES = ROW_SCALES + SIDE * 4
SCRATCH_BYTES = COLUMN_SCALES + SIDE * 4


def whole_powers(bits, power_of_two):
    """Scales rounded down to powers of two, if asked."""


@overloaded(whole_powers)
def _whole_powers(bits, power_of_two):
    if power_of_two.tag == "yes":
        return lambda bits, power_of_two: bits & INFINITY_BITS
    return lambda bits, power_of_two: bits


@inner
def _store_factors(amax, factors, scales, count, epsilon, largest_code, overflow, power_of_two):
    """Encode factors and stored scales of ``count`` amaxes (bits), a multiple of 16."""
    for i in range(0, count, 16):
        bits = load(amax + i * 4, 16, "i32")
        bits = maximum(bits, splat(bits_of(epsilon), 16, "i32"))
        factor = as_int(splat(largest_code, 16, "f32") / as_float(bits))
        factor = where_greater(factor, INFINITY_BITS - 1, bits_of(overflow), factor)
        factor = whole_powers(factor, power_of_two)
        factor = where_greater(bits, INFINITY_BITS - 1, ONE_BITS, factor)
        factor = where_greater(bits, 0, factor, ONE_BITS)
        store(factors + i * 4, factor)
        store(scales + i * 4, splat(np.float32(1.0), 16, "f32") / as_float(factor))


@inner
def _fill(buffer, value, count):
    for i in range(0, count, 16):
        store(buffer + i * 4, splat(value, 16, "f32"))


@inner
def _read(x, x_stride, scratch, height, width, dtype):
    """The part of the input under the tile, zeros beyond its edges. Returns the bits of its largest magnitude."""
    size = input_size(dtype)
    best, bits = splat(0, 32, "i32"), 0
    if height < SIDE or width < SIDE:
        _fill(scratch, np.float32(0.0), SIDE * SIDE)
    for row in range(height):
        source, target = x + row * x_stride, scratch + row * SIDE * 4
        whole = width // 32 * 32
        for col in range(0, whole, 32):
            v = load_input(source + col * size, 32, dtype)
            best = maximum(best, magnitude_bits(v, NO))
            store(target + col * 4, v)
        for col in range(whole, width):
            number = load_input(source + col * size, 1, dtype)
            bits = max(bits, largest(magnitude_bits(number, NO)))
            store(target + col * 4, number)
    return max(bits, largest(best))


@inner
def _measure(scratch, with_nan):
    """Amaxes of the tile's rows and columns; returns the largest."""
    c0 = splat(0, 32, "i32")
    c1 = splat(0, 32, "i32")
    c2 = splat(0, 32, "i32")
    c3 = splat(0, 32, "i32")
    for row in range(SIDE):
        at = scratch + row * SIDE * 4
        m0 = magnitude_bits(load(at, 32, "f32"), with_nan)
        m1 = magnitude_bits(load(at + 128, 32, "f32"), with_nan)
        m2 = magnitude_bits(load(at + 256, 32, "f32"), with_nan)
        m3 = magnitude_bits(load(at + 384, 32, "f32"), with_nan)
        store_i32(scratch + ROW_AMAX + row * 4, largest(maximum(maximum(m0, m1), maximum(m2, m3))))
        c0 = maximum(c0, m0)
        c1 = maximum(c1, m1)
        c2 = maximum(c2, m2)
        c3 = maximum(c3, m3)
    store(scratch + COLUMN_AMAX, c0)
    store(scratch + COLUMN_AMAX + 128, c1)
    store(scratch + COLUMN_AMAX + 256, c2)
    store(scratch + COLUMN_AMAX + 384, c3)
    return largest(maximum(maximum(c0, c1), maximum(c2, c3)))


@inner
def _encode_rows(scratch, codes, stride, height, width, element, with_nan):
    for row in range(height):
        factor = load_f32(scratch + ROW_FACTORS + row * 4)
        target = codes + row * stride if width == SIDE else scratch + CODES
        for col in range(0, SIDE, 32):
            v = load(scratch + (row * SIDE + col) * 4, 32, "f32") * factor
            store(target + col, narrow(encode_element(v, element, with_nan)))
        if width < SIDE:
            _copy(scratch + CODES, codes + row * stride, width)


@inner
def _copy(source, target, count):
    for i in range(count):
        store(target + i, load(source + i, 1, "u8"))


@inner
def _eight_rows(address, factor, element, with_nan):
    """Codes of four rows of 16 columns, a byte each, in two i32 vectors: rows 0-3 and 4-7."""
    row = SIDE * 4
    c0 = encode_element(load(address, 16, "f32") * factor, element, with_nan)
    c1 = encode_element(load(address + row, 16, "f32") * factor, element, with_nan)
    c2 = encode_element(load(address + 2 * row, 16, "f32") * factor, element, with_nan)
    c3 = encode_element(load(address + 3 * row, 16, "f32") * factor, element, with_nan)
    c4 = encode_element(load(address + 4 * row, 16, "f32") * factor, element, with_nan)
    c5 = encode_element(load(address + 5 * row, 16, "f32") * factor, element, with_nan)
    c6 = encode_element(load(address + 6 * row, 16, "f32") * factor, element, with_nan)
    c7 = encode_element(load(address + 7 * row, 16, "f32") * factor, element, with_nan)
    low = c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)
    high = c4 | (c5 << 8) | (c6 << 16) | (c7 << 24)
    return low, high


@inner
def _encode_columns(scratch, codes, stride, height, width, element, with_nan):
    lines = scratch + COLUMN_CODES  # [column][row]
    for col in range(0, SIDE, 16):
        factor = load(scratch + COLUMN_FACTORS + col * 4, 16, "f32")
        for row in range(0, SIDE, 8):
            low, high = _eight_rows(scratch + (row * SIDE + col) * 4, factor, element, with_nan)
            store_columns(lines + col * SIDE + row, SIDE, low, high)
    for col in range(width):
        if height == SIDE:
            store(codes + col * stride, load(lines + col * SIDE, 64, "u8"))
            store(codes + col * stride + 64, load(lines + col * SIDE + 64, 64, "u8"))
        else:
            _copy(lines + col * SIDE, codes + col * stride, height)


@inner
def _scale_tile(scratch, kind_1d, kind_2d, amax, factor, epsilon, largest_code, overflow, power_of_two):
    """Factors of all rows and columns of the tile."""
    if kind_1d:
        for direction in range(2):
            _store_factors(
                scratch + ROW_AMAX + direction * SIDE * 4,
                scratch + ROW_FACTORS + direction * SIDE * 4,
                scratch + ROW_SCALES + direction * SIDE * 4,
                SIDE, epsilon, largest_code, overflow, power_of_two,
            )  # fmt: skip
    else:
        if kind_2d:
            store(scratch + ROW_AMAX, splat(amax, 16, "i32"))
            _store_factors(
                scratch + ROW_AMAX, scratch + ROW_FACTORS, scratch + ROW_SCALES,
                16, epsilon, largest_code, overflow, power_of_two,
            )  # fmt: skip
            factor = load_f32(scratch + ROW_FACTORS)
        _fill(scratch + ROW_FACTORS, factor, SIDE)
        _fill(scratch + COLUMN_FACTORS, factor, SIDE)


@kernel
def tiles(
    x, x_stride, row_codes, row_stride, column_codes, column_stride,
    row_scales, row_scales_stride, column_scales, column_scales_stride,
    first, last, height, width, factor, epsilon, largest_code, overflow, scratch,
    rows_wanted, columns_wanted, kind_1d, kind_2d, dtype, element, power_of_two,
):  # fmt: skip
    """Rows of tiles ``first:last``. Without ``kind_1d`` and ``kind_2d``, one ``factor`` serves the tensor."""
    size, best = input_size(dtype), 0
    for tile_row in range(first, last):
        top = tile_row * SIDE
        high = min(SIDE, height - top)
        for tile_col in range((width + SIDE - 1) // SIDE):
            left = tile_col * SIDE
            wide = min(SIDE, width - left)
            bits = _read(x + top * x_stride + left * size, x_stride, scratch, high, wide, dtype)
            best = max(best, bits)
            clean = bits <= INFINITY_BITS
            amax = 0
            if kind_1d or kind_2d:
                amax = _measure(scratch, NO) if clean else _measure(scratch, YES)
            _scale_tile(scratch, kind_1d, kind_2d, amax, factor, epsilon, largest_code, overflow, power_of_two)
            to_row, to_column = row_codes + top * row_stride + left, column_codes + left * column_stride + top
            if rows_wanted:
                if clean:
                    _encode_rows(scratch, to_row, row_stride, high, wide, element, NO)
                else:
                    _encode_rows(scratch, to_row, row_stride, high, wide, element, YES)
                if kind_1d:
                    _copy(scratch + ROW_SCALES, row_scales + tile_col * row_scales_stride + top * 4, high * 4)
                elif kind_2d:
                    _copy(scratch + ROW_SCALES, row_scales + tile_row * row_scales_stride + tile_col * 4, 4)
            if columns_wanted:
                if clean:
                    _encode_columns(scratch, to_column, column_stride, high, wide, element, NO)
                else:
                    _encode_columns(scratch, to_column, column_stride, high, wide, element, YES)
                if kind_1d:
                    _copy(scratch + COLUMN_SCALES, column_scales + tile_row * column_scales_stride + left * 4, wide * 4)
                elif kind_2d:
                    _copy(scratch + ROW_SCALES, column_scales + tile_col * column_scales_stride + tile_row * 4, 4)
    return best
