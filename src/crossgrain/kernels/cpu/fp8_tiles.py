"""FP8 in tiles of 128x128: block scales of a row piece, a column piece or the tile, or one for the tensor.

Column codes are stored transposed. Where rows and columns share their scales, they are the row codes of a tile, turned.
With a scale for each row piece and each column piece, the tile is read into a buffer and encoded twice: eight rows at a
time, whose codes in one column are eight bytes of the result.
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
    prefetch,
    splat,
    store,
    store_i32,
    where_greater,
)
from .tags import F32, NO, YES
from .tiles import store_columns, turn_bytes

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
def _read_ahead(address):
    """Ask for what the next tile will read: pieces of rows are too short for the CPU to see that they go on."""
    prefetch(address)
    prefetch(address + 64)


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
            _read_ahead(source + (SIDE + col) * size)
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
def _cast(x, x_stride, codes, height, width, factor, dtype, element, with_nan):
    """Codes of a tile under one factor, [SIDE][SIDE]. Returns the bits of its largest magnitude."""
    size = input_size(dtype)
    best, bits = splat(0, 32, "i32"), 0
    for row in range(height):
        source, target = x + row * x_stride, codes + row * SIDE
        whole = width // 32 * 32
        for col in range(0, whole, 32):
            v = load_input(source + col * size, 32, dtype)
            _read_ahead(source + (SIDE + col) * size)
            best = maximum(best, magnitude_bits(v, NO))
            store(target + col, narrow(encode_element(v * factor, element, with_nan)))
        for col in range(whole, width):
            number = load_input(source + col * size, 1, dtype)
            bits = max(bits, largest(magnitude_bits(number, NO)))
            store(target + col, narrow(encode_element(number * factor, element, with_nan)))
    return max(bits, largest(best))


@inner
def _store_lines(lines, codes, stride, count, length):
    """``count`` lines of a tile of codes."""
    for line in range(count):
        if length == SIDE:
            store(codes + line * stride, load(lines + line * SIDE, 64, "u8"))
            store(codes + line * stride + 64, load(lines + line * SIDE + 64, 64, "u8"))
        else:
            _copy(lines + line * SIDE, codes + line * stride, length)


@inner
def _turn(codes, turned):
    """A tile of codes, [row][column], to [column][row]."""
    for row in range(0, SIDE, 16):
        for col in range(0, SIDE, 64):
            turn_bytes(codes + row * SIDE + col, SIDE, turned + col * SIDE + row, SIDE)


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
    _store_lines(lines, codes, stride, width, height)


@inner
def _tile_factor(scratch, amax, epsilon, largest_code, overflow, power_of_two):
    """The factor of a whole tile; its scale is written to the scratch."""
    store(scratch + ROW_AMAX, splat(amax, 16, "i32"))
    _store_factors(
        scratch + ROW_AMAX, scratch + ROW_FACTORS, scratch + ROW_SCALES,
        16, epsilon, largest_code, overflow, power_of_two,
    )  # fmt: skip
    return load_f32(scratch + ROW_FACTORS)


@inner
def _store_both(scratch, row_codes, row_stride, column_codes, column_stride, high, wide, rows_wanted, columns_wanted):
    """The codes of a tile to the planes that are wanted."""
    if rows_wanted:
        _store_lines(scratch + CODES, row_codes, row_stride, high, wide)
    if columns_wanted:
        _turn(scratch + CODES, scratch + COLUMN_CODES)
        _store_lines(scratch + COLUMN_CODES, column_codes, column_stride, wide, high)


@kernel
def whole(
    x, x_stride, row_codes, row_stride, column_codes, column_stride,
    first, last, height, width, factor, scratch, rows_wanted, columns_wanted, dtype, element,
):  # fmt: skip
    """Rows of tiles ``first:last``, with one ``factor`` for the tensor."""
    size, best = input_size(dtype), 0
    codes = scratch + CODES
    finite = abs(factor) < np.inf  # or it makes NaNs of numbers; and a factor of 0 makes them of infinities
    for tile_row in range(first, last):
        top = tile_row * SIDE
        high = min(SIDE, height - top)
        for tile_col in range((width + SIDE - 1) // SIDE):
            left = tile_col * SIDE
            wide = min(SIDE, width - left)
            here = x + top * x_stride + left * size
            bits = _cast(here, x_stride, codes, high, wide, factor, dtype, element, NO)
            if bits >= INFINITY_BITS or not finite:
                _cast(here, x_stride, codes, high, wide, factor, dtype, element, YES)
            best = max(best, bits)
            _store_both(
                scratch, row_codes + top * row_stride + left, row_stride,
                column_codes + left * column_stride + top, column_stride, high, wide, rows_wanted, columns_wanted,
            )  # fmt: skip
    return best


@kernel
def tiles(
    x, x_stride, row_codes, row_stride, column_codes, column_stride,
    row_scales, row_scales_stride, column_scales, column_scales_stride,
    first, last, height, width, epsilon, largest_code, overflow, scratch,
    rows_wanted, columns_wanted, square, dtype, element, power_of_two,
):  # fmt: skip
    """Rows of tiles ``first:last``: one scale for each tile if it is ``square``, else for its rows and its columns."""
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
            to_row, to_column = row_codes + top * row_stride + left, column_codes + left * column_stride + top
            if square:
                amax = bits if clean else _measure(scratch, YES)
                factor = _tile_factor(scratch, amax, epsilon, largest_code, overflow, power_of_two)
                if clean:
                    _cast(scratch, SIDE * 4, scratch + CODES, SIDE, SIDE, factor, F32, element, NO)
                else:
                    _cast(scratch, SIDE * 4, scratch + CODES, SIDE, SIDE, factor, F32, element, YES)
                _store_both(
                    scratch, to_row, row_stride, to_column, column_stride, high, wide, rows_wanted, columns_wanted
                )
                if rows_wanted:
                    _copy(scratch + ROW_SCALES, row_scales + tile_row * row_scales_stride + tile_col * 4, 4)
                if columns_wanted:
                    _copy(scratch + ROW_SCALES, column_scales + tile_col * column_scales_stride + tile_row * 4, 4)
                continue
            if clean:
                _measure(scratch, NO)
            else:
                _measure(scratch, YES)
            for direction in range(2):
                _store_factors(
                    scratch + ROW_AMAX + direction * SIDE * 4,
                    scratch + ROW_FACTORS + direction * SIDE * 4,
                    scratch + ROW_SCALES + direction * SIDE * 4,
                    SIDE, epsilon, largest_code, overflow, power_of_two,
                )  # fmt: skip
            if rows_wanted:
                if clean:
                    _encode_rows(scratch, to_row, row_stride, high, wide, element, NO)
                else:
                    _encode_rows(scratch, to_row, row_stride, high, wide, element, YES)
                _copy(scratch + ROW_SCALES, row_scales + tile_col * row_scales_stride + top * 4, high * 4)
            if columns_wanted:
                if clean:
                    _encode_columns(scratch, to_column, column_stride, high, wide, element, NO)
                else:
                    _encode_columns(scratch, to_column, column_stride, high, wide, element, YES)
                _copy(scratch + COLUMN_SCALES, column_scales + tile_row * column_scales_stride + left * 4, wide * 4)
    return best
