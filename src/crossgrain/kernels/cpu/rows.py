"""Encoding along rows: every block is a run of neighbours in memory.

Kernels take addresses, strides in bytes, a range of rows, and tags; they own nothing and can run on
several threads at once, each on rows of its own.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from .elements import (
    INFINITY_BITS,
    at_most_fp32_max,
    decode_element,
    e8m0_reciprocal,
    e8m0_up,
    encode_element,
    inner,
    input_size,
    kernel,
    load_input,
    magnitude_bits,
    reciprocal_of_max,
)
from .random_bits import encode_stochastically, hash_counters, lane_numbers
from .simd import (
    as_float,
    bits_of,
    float_of,
    largest,
    load,
    load_f32,
    maximum,
    narrow,
    pack_nibbles,
    splat,
    store,
    store_i32,
    store_u8,
    widen,
)


@kernel
def amax_bits(x, start, stop, dtype, with_nan, no):
    """Bits of the largest magnitude of elements ``start:stop``; above those of Inf if there is a NaN unseen."""
    size = input_size(dtype)
    best = splat(0, 32, "i32")
    position = start
    while position + 32 <= stop:
        best = maximum(best, magnitude_bits(load_input(x + position * size, 32, dtype), with_nan))
        position += 32
    bits = largest(best)
    while position < stop:
        bits = max(bits, largest(magnitude_bits(load_input(x + position * size, 1, dtype), with_nan)))
        position += 1
    return bits


@inner
def mx_block(v, codes, scale, element, with_nan):
    """One row block of 32 with an E8M0 scale."""
    amax = largest(magnitude_bits(v, with_nan))
    byte = e8m0_up(bits_of(float_of(amax) * reciprocal_of_max(element)))
    store_u8(scale, byte)
    store(codes, narrow(encode_element(v * e8m0_reciprocal(byte), element, with_nan)))


@inner
def mx_block_checked(v, codes, scale, element, no, yes):
    """One row block; the rare ones with a NaN take more care."""
    amax = largest(magnitude_bits(v, no))
    if amax > INFINITY_BITS:
        mx_block(v, codes, scale, element, yes)
        return
    byte = e8m0_up(bits_of(float_of(amax) * reciprocal_of_max(element)))
    store_u8(scale, byte)
    store(codes, narrow(encode_element(v * e8m0_reciprocal(byte), element, no)))


@kernel
def mx_rows(x, x_stride, codes, codes_stride, scales, scales_stride, first, last, cols, dtype, element, no, yes):
    """MXFP8 rowwise: x [rows, cols] -> codes [rows, cols], scales [rows, cols / 32]."""
    size = input_size(dtype)
    for row in range(first, last):
        source, target, scale = x + row * x_stride, codes + row * codes_stride, scales + row * scales_stride
        for col in range(0, cols, 32):
            v = load_input(source + col * size, 32, dtype)
            mx_block_checked(v, target + col, scale + col // 32, element, no, yes)


@kernel
def cast(x, codes, scale, start, stop, dtype, element, with_nan):
    """Per-tensor FP8: elements ``start:stop`` times ``scale``."""
    size = input_size(dtype)
    position = start
    while position + 32 <= stop:
        v = load_input(x + position * size, 32, dtype)
        store(codes + position, narrow(encode_element(v * scale, element, with_nan)))
        position += 32
    while position < stop:
        v = load_input(x + position * size, 1, dtype)
        store(codes + position, narrow(encode_element(v * scale, element, with_nan)))
        position += 1


@inner
def nvfp4_scales(amax, encode_scale, decode_scale, e4m3, no):
    """Stored E4M3 bytes (i32 lanes) and encode factors of 8 blocks, from the bits of their amaxes."""
    wanted = at_most_fp32_max(as_float(amax) * encode_scale)
    stored = encode_element(wanted, e4m3, no)
    unit = splat(np.float32(1.0), 8, "f32")
    factor = at_most_fp32_max(unit / (decode_element(stored, e4m3) * decode_scale))
    return stored, factor


@inner
def nvfp4_group(
    source, codes, scales, blocks, encode_scale, decode_scale, scratch, counter, key0, key1,
    dtype, e4m3, e2m1, stochastic, no, with_nan,
):  # fmt: skip
    """Up to 8 row blocks of 16. ``scratch`` is 192 bytes. Returns the largest magnitude's bits."""
    size = input_size(dtype)
    store(scratch, splat(0, 8, "i32"))
    worst = 0
    for block in range(blocks):
        amax = largest(magnitude_bits(load_input(source + block * 16 * size, 16, dtype), with_nan))
        store_i32(scratch + block * 4, amax)
        worst = max(worst, amax)
    if worst > INFINITY_BITS:
        return worst
    stored, factor = nvfp4_scales(load(scratch, 8, "i32"), encode_scale, decode_scale, e4m3, no)
    store(scratch, factor)
    if blocks == 8:
        store(scales, narrow(stored))
    else:
        store(scratch + 32, narrow(stored))
        for block in range(blocks):
            store(scales + block, load(scratch + 32 + block, 1, "u8"))
    draw_bytes(scratch + 64, counter, key0, key1, stochastic)
    for block in range(blocks):
        v = load_input(source + block * 16 * size, 16, dtype) * load_f32(scratch + block * 4)
        store(codes + block * 8, pack_nibbles(rounded(v, scratch + 64 + block * 16, e2m1, stochastic, with_nan)))
    return worst


def draw_bytes(address, counter, key0, key1, stochastic):
    """128 random bytes for 128 neighbours, if they are needed."""


@overload(draw_bytes)
def _draw_bytes(address, counter, key0, key1, stochastic):
    if stochastic.tag == "no":
        return lambda address, counter, key0, key1, stochastic: None

    def draw(address, counter, key0, key1, stochastic):
        store(address, hash_counters(lane_numbers(32) + counter, key0, key1))

    return draw


def rounded(v, random_bytes, element, stochastic, with_nan):
    """Codes of 16 numbers, to nearest or by the random bytes at an address."""


@overload(rounded)
def _rounded(v, random_bytes, element, stochastic, with_nan):
    if stochastic.tag == "no":
        return lambda v, random_bytes, element, stochastic, with_nan: encode_element(v, element, with_nan)

    def stochastically(v, random_bytes, element, stochastic, with_nan):
        return encode_stochastically(v, widen(load(random_bytes, 16, "u8")), element)

    return stochastically


@kernel
def nvfp4_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, scale_step,
    first, last, cols, scratch, key0, key1, dtype, e4m3, e2m1, stochastic, random, no, yes,
):  # fmt: skip
    """NVFP4 rowwise: x [rows, cols] -> codes [rows, cols / 2], scales [rows, cols / 16].

    The global scales are read from ``encode_scales`` and ``decode_scales``, ``scale_step`` bytes apart
    from row to row: 0 where the whole tensor shares one. Returns False at a NaN if rounding is ``random``.
    """
    size = input_size(dtype)
    for row in range(first, last):
        source, target, scale = x + row * x_stride, codes + row * codes_stride, scales + row * scales_stride
        encode_scale = load_f32(encode_scales + row * scale_step)
        decode_scale = load_f32(decode_scales + row * scale_step)
        for col in range(0, cols, 128):
            blocks = min(8, (cols - col) // 16)
            here, there, its_scales = source + col * size, target + col // 2, scale + col // 16
            counter = row * (cols // 4) + col // 4
            worst = nvfp4_group(
                here, there, its_scales, blocks, encode_scale, decode_scale, scratch, counter, key0, key1,
                dtype, e4m3, e2m1, stochastic, no, no,
            )  # fmt: skip
            if worst > INFINITY_BITS:
                if random:
                    return False
                nvfp4_group(
                    here, there, its_scales, blocks, encode_scale, decode_scale, scratch, counter, key0, key1,
                    dtype, e4m3, e2m1, stochastic, no, yes,
                )  # fmt: skip
    return True


@kernel
def nvfp4_tile_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scale, decode_scale,
    first, last, cols, scratch, dtype, e4m3, e2m1, no,
):  # fmt: skip
    """NVFP4 rowwise with a scale per 16x16 tile, stored for each of its rows; strips of 16 rows.

    ``scratch`` is 96 bytes. Returns False at a NaN.
    """
    size = input_size(dtype)
    for strip in range(first, last):
        top = strip * 16
        for left in range(0, cols, 128):
            blocks = min(8, (cols - left) // 16)
            store(scratch, splat(0, 8, "i32"))
            for block in range(blocks):
                amax = splat(0, 16, "i32")
                for row in range(16):
                    v = load_input(x + (top + row) * x_stride + (left + block * 16) * size, 16, dtype)
                    amax = maximum(amax, magnitude_bits(v, no))
                worst = largest(amax)
                if worst > INFINITY_BITS:
                    return False
                store_i32(scratch + block * 4, worst)
            stored, factor = nvfp4_scales(load(scratch, 8, "i32"), encode_scale, decode_scale, e4m3, no)
            store(scratch, factor)
            store(scratch + 64, narrow(stored))
            for row in range(16):
                source = x + (top + row) * x_stride + left * size
                target = codes + (top + row) * codes_stride + left // 2
                scale = scales + (top + row) * scales_stride + left // 16
                for block in range(blocks):
                    v = load_input(source + block * 16 * size, 16, dtype) * load_f32(scratch + block * 4)
                    store(target + block * 8, pack_nibbles(encode_element(v, e2m1, no)))
                    store(scale + block, load(scratch + 64 + block, 1, "u8"))
    return True
