"""Decoding planes to fp32 matrices [rows, cols].

``streaming`` writes past the caches: for results that are larger than they are.
"""

from __future__ import annotations

from numba.extending import overload

from .elements import decode_element, e8m0_value, e8m0_value_vector, inner, kernel
from .simd import bits_of, load, load_f32, load_u8, store, stream, unpack_nibbles, widen


def put(address, vector, streaming):
    """Store, past the caches or not."""


@overload(put)
def _put(address, vector, streaming):
    if streaming.tag == "yes":
        return lambda address, vector, streaming: stream(address, vector)
    return lambda address, vector, streaming: store(address, vector)


@kernel
def scaled(codes, out, factor, start, stop, element, streaming):
    """Codes ``start:stop`` times one factor."""
    position = start
    while position + 32 <= stop:
        put(out + position * 4, decode_element(widen(load(codes + position, 32, "u8")), element) * factor, streaming)
        position += 32
    while position < stop:
        store(out + position * 4, decode_element(widen(load(codes + position, 1, "u8")), element) * factor)
        position += 1


@kernel
def mx_rows(codes, codes_stride, scales, scales_stride, out, first, last, cols, element, streaming):
    """A scale for every 32 along a row."""
    for row in range(first, last):
        source, scale, target = codes + row * codes_stride, scales + row * scales_stride, out + row * cols * 4
        for col in range(0, cols, 32):
            v = decode_element(widen(load(source + col, 32, "u8")), element)
            put(target + col * 4, v * e8m0_value(load_u8(scale + col // 32)), streaming)


@kernel
def mx_columns(codes, codes_stride, scales, scales_stride, out, first, last, cols, element, streaming):
    """A scale for every 32 down a column; codes are stored row by row."""
    for row in range(first, last):
        source, scale, target = codes + row * codes_stride, scales + (row // 32) * scales_stride, out + row * cols * 4
        for col in range(0, cols, 32):
            v = decode_element(widen(load(source + col, 32, "u8")), element)
            put(target + col * 4, v * e8m0_value_vector(widen(load(scale + col, 32, "u8"))), streaming)


@inner
def _fill_factors(table, amax, constant, e4m3):
    """What each of the 256 block scales stands for under one amax, in the hardware's order."""
    for byte in range(256):
        store(table + byte * 4, (decode_element(widen(load(table + 1024 + byte, 1, "u8")), e4m3) * amax) * constant)


@kernel
def nvfp4_rows(
    codes, codes_stride, scales, scales_stride, amax, amax_step, constant, out, first, last, cols, table,
    e4m3, e2m1, streaming,
):  # fmt: skip
    """Two codes a byte, a scale for every 16, an amax per tensor (step 0) or row.

    ``table`` is 256 floats of scratch, followed by the bytes 0 to 255.
    """
    current = load_f32(amax + first * amax_step)
    _fill_factors(table, current, constant, e4m3)
    for row in range(first, last):
        source, scale, target = codes + row * codes_stride, scales + row * scales_stride, out + row * cols * 4
        here = load_f32(amax + row * amax_step)
        if bits_of(here) != bits_of(current):
            current = here
            _fill_factors(table, current, constant, e4m3)
        for col in range(0, cols, 16):
            factor = load_f32(table + load_u8(scale + col // 16) * 4)
            v = decode_element(unpack_nibbles(load(source + col // 2, 8, "u8")), e2m1)
            put(target + col * 4, v * factor, streaming)


@kernel
def block_rows(
    codes, codes_stride, scales, row_step, block_step, tile_rows, out, first, last, cols, element, streaming
):
    """An fp32 scale for every 128 along a row (of ``tile_rows`` rows); a last block may be partial."""
    for row in range(first, last):
        source, target = codes + row * codes_stride, out + row * cols * 4
        scale = scales + (row // tile_rows) * row_step
        for left in range(0, cols, 128):
            factor = load_f32(scale + (left // 128) * block_step)
            stop = min(left + 128, cols)
            whole = left + (stop - left) // 32 * 32
            for col in range(left, whole, 32):
                v = decode_element(widen(load(source + col, 32, "u8")), element)
                put(target + col * 4, v * factor, streaming)
            for col in range(whole, stop):
                store(target + col * 4, decode_element(widen(load(source + col, 1, "u8")), element) * factor)
