"""Decoding planes to fp32 or bf16 matrices [rows, cols].

``dtype`` is that of the result: bf16 is the fp32 result, rounded on the way to memory. ``streaming`` writes
past the caches: for results that are larger than they are.
"""

from __future__ import annotations

import numpy as np

from .compiling import inner, kernel, overloaded
from .elements import (
    E2M1_TAG,
    E4M3_TAG,
    bytes_of_codes,
    decode_element,
    e8m0_value,
    e8m0_value_vector,
    input_size,
    load_codes,
)
from .simd import bits_of, load, load_f32, load_u8, store, stream, to_bf16, widen
from .tags import NO


def put(address, vector, dtype, streaming):
    """Store as ``dtype``, past the caches or not."""


@overloaded(put)
def _put(address, vector, dtype, streaming):
    if dtype.tag == "bf16" and streaming.tag == "yes":
        return lambda address, vector, dtype, streaming: stream(address, to_bf16(vector))
    if dtype.tag == "bf16":
        return lambda address, vector, dtype, streaming: store(address, to_bf16(vector))
    if streaming.tag == "yes":
        return lambda address, vector, dtype, streaming: stream(address, vector)
    return lambda address, vector, dtype, streaming: store(address, vector)


@inner
def _scaled_run(codes, out, factor, start, stop, dtype, element, streaming):
    """Codes ``start:stop`` of one byte times one factor."""
    size = input_size(dtype)
    whole = start + (stop - start) // 32 * 32
    for position in range(start, whole, 32):
        v = decode_element(load_codes(codes + position, 32, element), element)
        put(out + position * size, v * factor, dtype, streaming)
    for position in range(whole, stop):
        v = decode_element(load_codes(codes + position, 1, element), element)
        put(out + position * size, v * factor, dtype, NO)


@kernel
def scaled(codes, out, factor, start, stop, dtype, element, streaming):
    """Codes ``start:stop`` times one factor."""
    _scaled_run(codes, out, factor, start, stop, dtype, element, streaming)
    return np.int64(0)


@kernel
def mx_rows(codes, codes_stride, scales, scales_stride, out, first, last, cols, dtype, element, streaming):
    """A scale for every 32 along a row."""
    size = input_size(dtype)
    for row in range(first, last):
        source, scale, target = codes + row * codes_stride, scales + row * scales_stride, out + row * cols * size
        for col in range(0, cols, 32):
            v = decode_element(load_codes(source + bytes_of_codes(col, element), 32, element), element)
            put(target + col * size, v * e8m0_value(load_u8(scale + col // 32)), dtype, streaming)
    return np.int64(0)


@kernel
def mx_columns(codes, codes_stride, scales, scales_stride, out, first, last, cols, dtype, element, streaming):
    """A scale for every 32 down a column; codes are stored row by row."""
    size = input_size(dtype)
    for row in range(first, last):
        source, scale = codes + row * codes_stride, scales + (row // 32) * scales_stride
        target = out + row * cols * size
        for col in range(0, cols, 32):
            v = decode_element(load_codes(source + col, 32, element), element)
            put(target + col * size, v * e8m0_value_vector(widen(load(scale + col, 32, "u8"))), dtype, streaming)
    return np.int64(0)


@inner
def _fill_factors(table, amax, constant):
    """What each of the 256 block scales stands for under one amax, in the hardware's order."""
    for byte in range(256):
        value = decode_element(load_codes(table + 1024 + byte, 1, E4M3_TAG), E4M3_TAG)
        store(table + byte * 4, (value * amax) * constant)


@kernel
def nvfp4_rows(
    codes, codes_stride, scales, scales_stride, amax, amax_step, constant, out, first, last, cols, table,
    dtype, streaming,
):  # fmt: skip
    """Two codes a byte, a scale for every 16, an amax per tensor (step 0) or row.

    ``table`` is 256 floats of scratch, followed by the bytes 0 to 255.
    """
    size = input_size(dtype)
    current = load_f32(amax + first * amax_step)
    _fill_factors(table, current, constant)
    for row in range(first, last):
        source, scale, target = codes + row * codes_stride, scales + row * scales_stride, out + row * cols * size
        here = load_f32(amax + row * amax_step)
        if bits_of(here) != bits_of(current):
            current = here
            _fill_factors(table, current, constant)
        for col in range(0, cols, 16):
            factor = load_f32(table + load_u8(scale + col // 16) * 4)
            v = decode_element(load_codes(source + col // 2, 16, E2M1_TAG), E2M1_TAG)
            put(target + col * size, v * factor, dtype, streaming)
    return np.int64(0)


@kernel
def block_rows(
    codes, codes_stride, scales, row_step, block_step, tile_rows, out, first, last, cols, dtype, element, streaming
):
    """An fp32 scale for every 128 along a row (of ``tile_rows`` rows); a last block may be partial."""
    for row in range(first, last):
        source, target = codes + row * codes_stride, out + row * cols * input_size(dtype)
        scale = scales + (row // tile_rows) * row_step
        for left in range(0, cols, 128):
            factor = load_f32(scale + (left // 128) * block_step)
            _scaled_run(source, target, factor, left, min(left + 128, cols), dtype, element, streaming)
    return np.int64(0)
