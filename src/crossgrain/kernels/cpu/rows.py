"""Encoding along rows: every block is a run of neighbours in memory.

Kernels take addresses, strides in bytes, a range of rows, and tags; they own nothing and can run on
several threads at once, each on rows of its own. They return the bits of the largest magnitude that they
have seen: from those of Inf on, the input has an Inf or a NaN, which the codes may not show.
"""

from __future__ import annotations

import numpy as np

from .calling import caller
from .compiling import inner, kernel, overloaded
from .elements import (
    E2M1_TAG,
    E4M3_TAG,
    INFINITY_BITS,
    _element,
    at_most_fp32_max,
    bytes_of_codes,
    decode_element,
    e8m0_byte,
    e8m0_bytes,
    e8m0_reciprocal,
    e8m0_reciprocal_vector,
    encode_element,
    input_size,
    load_input,
    loose_bytes,
    magnitude_bits,
    pack_codes,
)
from .packing import pack_nibbles
from .random_bits import random_bytes, rounded
from .simd import (
    as_float,
    largest,
    load,
    load_f32,
    maximum,
    narrow,
    side_by_side,
    splat,
    store,
    store_i32,
    store_u8,
)
from .tags import NO, YES
from .tiles import amax_of_eight

RUN_SCRATCH = 192  # bytes that `encode_run` needs


@kernel
def cast(x, codes, scale, start, stop, dtype, element, with_nan):
    """Per-tensor FP8: elements ``start:stop`` times ``scale``."""
    size = input_size(dtype)
    best = splat(0, 32, "i32")
    position = start
    while position + 32 <= stop:
        v = load_input(x + position * size, 32, dtype)
        best = maximum(best, magnitude_bits(v, NO))
        store(codes + position, narrow(encode_element(v * scale, element, with_nan)))
        position += 32
    bits = largest(best)
    while position < stop:
        v = load_input(x + position * size, 1, dtype)
        bits = max(bits, largest(magnitude_bits(v, NO)))
        store(codes + position, narrow(encode_element(v * scale, element, with_nan)))
        position += 1
    return np.int64(bits)


# ---- blocks of 32 with an E8M0 scale -----------------------------------------------------------------


@inner
def _mx_block(v, amax, codes, scale, random, element, rule, stochastic, with_nan):
    byte = e8m0_byte(amax, element, rule)
    store_u8(scale, byte)
    store(codes, pack_codes(rounded(v * e8m0_reciprocal(byte), random, element, stochastic, with_nan), element))


@inner
def mx_block(v, codes, scale, random, element, rule, stochastic):
    """One block; the rare ones with a NaN take more care. Returns the bits of its largest magnitude, or of a NaN."""
    amax = largest(magnitude_bits(v, NO))
    if amax <= INFINITY_BITS:
        _mx_block(v, amax, codes, scale, random, element, rule, stochastic, NO)
    else:
        usable = largest(magnitude_bits(v, YES))
        _mx_block(v, usable, codes, scale, random, element, rule, stochastic, YES)
    return amax


def encode_within(source, codes, factors, counter, step, key0, key1, dtype, element, rule, stochastic):
    """Two blocks without NaN or Inf, by their factors."""


@overloaded(encode_within)
def _encode_within(source, codes, factors, counter, step, key0, key1, dtype, element, rule, stochastic):
    def bytes_(source, codes, factors, counter, step, key0, key1, dtype, element, rule, stochastic):
        one = load_input(source, 32, dtype) * load_f32(factors)
        other = load_input(source + 32 * input_size(dtype), 32, dtype) * load_f32(factors + 4)
        store(codes, loose_bytes(side_by_side(one, other), element))

    def any_(source, codes, factors, counter, step, key0, key1, dtype, element, rule, stochastic):
        for block in range(2):
            v = load_input(source + block * 32 * input_size(dtype), 32, dtype) * load_f32(factors + block * 4)
            random = random_bytes(counter + block * 8 * step, step, key0, key1, 8, stochastic)
            packed = pack_codes(rounded(v, random, element, stochastic, NO), element)
            store(codes + bytes_of_codes(block * 32, element), packed)

    # Numbers under a scale that is rounded up need no saturation: they exceed the largest code by a rounding error.
    simple = stochastic.tag == "no" and rule.tag == "e8m0_up" and _element(element).bits == 8
    return bytes_ if simple else any_


@inner
def _eight_mx_blocks(source, codes, scales, scratch, counter, step, key0, key1, dtype, element, rule, stochastic):
    """Eight blocks at once. Returns their largest bits; if those are of a NaN or Inf, nothing is written."""
    far = 32 * input_size(dtype)
    amax = amax_of_eight(
        block_of_32(source, dtype), block_of_32(source + far, dtype),
        block_of_32(source + 2 * far, dtype), block_of_32(source + 3 * far, dtype),
        block_of_32(source + 4 * far, dtype), block_of_32(source + 5 * far, dtype),
        block_of_32(source + 6 * far, dtype), block_of_32(source + 7 * far, dtype),
    )  # fmt: skip
    best = largest(amax)
    if best >= INFINITY_BITS:
        return best
    byte = e8m0_bytes(amax, element, rule)
    store(scales, narrow(byte))
    store(scratch, e8m0_reciprocal_vector(byte))
    for block in range(0, 8, 2):
        encode_within(
            source + block * far, codes + bytes_of_codes(block * 32, element), scratch + block * 4,
            counter + block * 8 * step, step, key0, key1, dtype, element, rule, stochastic,
        )  # fmt: skip
    return best


@inner
def block_of_32(source, dtype):
    """The larger magnitudes of both halves of a block."""
    size = input_size(dtype)
    one, other = load_input(source, 16, dtype), load_input(source + 16 * size, 16, dtype)
    return as_float(maximum(magnitude_bits(one, NO), magnitude_bits(other, NO)))


# ---- blocks of 16 with a two-level scale -------------------------------------------------------------


@inner
def nvfp4_scales(amax, encode_scale, decode_scale):
    """Stored E4M3 bytes (i32 lanes) and encode factors of 8 blocks, from the bits of their amaxes."""
    wanted = at_most_fp32_max(as_float(amax) * encode_scale)
    stored = encode_element(wanted, E4M3_TAG, NO)
    unit = splat(np.float32(1.0), 8, "f32")
    factor = at_most_fp32_max(unit / (decode_element(stored, E4M3_TAG) * decode_scale))
    return stored, factor


@inner
def _nvfp4_codes(source, codes, factors, random, block, dtype, stochastic, with_nan):
    """One block by its factor; 16 of the random bytes are its own."""
    v = load_input(source + block * 16 * input_size(dtype), 16, dtype) * load_f32(factors + block * 4)
    its_own = load(random + block * 16, 16, "u8")
    store(codes + block * 8, pack_nibbles(rounded(v, its_own, E2M1_TAG, stochastic, with_nan)))


@inner
def _eight_blocks(
    source, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1, dtype, stochastic
):
    """Eight row blocks of 16 at once. Returns their largest bits; if those are of a NaN, nothing is written."""
    far = 16 * input_size(dtype)
    amax = amax_of_eight(
        load_input(source, 16, dtype), load_input(source + far, 16, dtype),
        load_input(source + 2 * far, 16, dtype), load_input(source + 3 * far, 16, dtype),
        load_input(source + 4 * far, 16, dtype), load_input(source + 5 * far, 16, dtype),
        load_input(source + 6 * far, 16, dtype), load_input(source + 7 * far, 16, dtype),
    )  # fmt: skip
    best = largest(amax)
    if best > INFINITY_BITS:
        return best
    stored, factor = nvfp4_scales(amax, encode_scale, decode_scale)
    store(scales, narrow(stored))
    store(scratch, factor)
    store(scratch + 64, random_bytes(counter, step, key0, key1, 32, stochastic))
    for block in range(8):
        _nvfp4_codes(source, codes, scratch, scratch + 64, block, dtype, stochastic, NO)
    return best


@inner
def _some_blocks(
    source, codes, scales, blocks, encode_scale, decode_scale, scratch, counter, step, key0, key1, dtype, stochastic
):
    """Up to 8 row blocks of 16, with NaNs or without."""
    store(scratch, splat(0, 8, "i32"))
    best = 0
    for block in range(blocks):
        v = load_input(source + block * 16 * input_size(dtype), 16, dtype)
        best = max(best, largest(magnitude_bits(v, NO)))
        store_i32(scratch + block * 4, largest(magnitude_bits(v, YES)))
    stored, factor = nvfp4_scales(load(scratch, 8, "i32"), encode_scale, decode_scale)
    store(scratch, factor)
    store(scratch + 32, narrow(stored))
    store(scratch + 64, random_bytes(counter, step, key0, key1, 32, stochastic))
    for block in range(blocks):
        store(scales + block, load(scratch + 32 + block, 1, "u8"))
        _nvfp4_codes(source, codes, scratch, scratch + 64, block, dtype, stochastic, YES)
    return best


# ---- runs of any of them -----------------------------------------------------------------------------


def encode_run(
    source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
    dtype, element, rule, stochastic,
):  # fmt: skip
    """``length`` neighbours, whole blocks, by the scale rule that the tag names.

    ``encode_scale`` and ``decode_scale`` are the global ones, where there are any; ``counter`` is that of
    the first random word, the next ones follow ``step`` apart. Returns the bits of the largest magnitude.
    """


@overloaded(encode_run)
def _encode_run(
    source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
    dtype, element, rule, stochastic,
):  # fmt: skip
    def per_tensor(
        source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
        dtype, element, rule, stochastic,
    ):  # fmt: skip
        size = input_size(dtype)
        best = splat(0, 32, "i32")
        for start in range(0, length, 32):
            position = min(start, length - 32)  # the last 32 may overlap those before
            v = load_input(source + position * size, 32, dtype)
            best = maximum(best, magnitude_bits(v, NO))
            store(codes + position, narrow(encode_element(v * encode_scale, element, YES)))
        return largest(best)

    def powers_of_two(
        source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
        dtype, element, rule, stochastic,
    ):  # fmt: skip
        size, best, position = input_size(dtype), 0, 0
        while position < length:
            here, first = source + position * size, counter + (position // 4) * step
            target, scale = codes + bytes_of_codes(position, element), scales + position // 32
            blocks, bits = min(8, (length - position) // 32), INFINITY_BITS
            if blocks == 8:
                bits = _eight_mx_blocks(
                    here, target, scale, scratch, first, step, key0, key1, dtype, element, rule, stochastic
                )
            if bits >= INFINITY_BITS:
                bits = 0
                for block in range(blocks):
                    v = load_input(here + block * 32 * size, 32, dtype)
                    random = random_bytes(first + block * 8 * step, step, key0, key1, 8, stochastic)
                    into = target + bytes_of_codes(block * 32, element)
                    bits = max(bits, mx_block(v, into, scale + block, random, element, rule, stochastic))
            best = max(best, bits)
            position += 256
        return best

    def two_level(
        source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
        dtype, element, rule, stochastic,
    ):  # fmt: skip
        size, best = input_size(dtype), 0
        for position in range(0, length, 128):
            blocks = min(8, (length - position) // 16)
            here, target, scale = source + position * size, codes + position // 2, scales + position // 16
            first = counter + (position // 4) * step
            bits = INFINITY_BITS + 1
            if blocks == 8:
                bits = _eight_blocks(
                    here, target, scale, encode_scale, decode_scale, scratch, first, step, key0, key1, dtype, stochastic
                )
            if bits > INFINITY_BITS:
                bits = _some_blocks(
                    here, target, scale, blocks, encode_scale, decode_scale, scratch, first, step, key0, key1,
                    dtype, stochastic,
                )  # fmt: skip
            best = max(best, bits)
        return best

    by_rule = {"fp32": per_tensor, "two_level": two_level}
    return by_rule.get(rule.tag, powers_of_two)


@kernel
def run(
    source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
    dtype, element, rule, stochastic,
):  # fmt: skip
    """`encode_run`, for other kernels."""
    return np.int64(
        encode_run(
            source, length, codes, scales, encode_scale, decode_scale, scratch, counter, step, key0, key1,
            dtype, element, rule, stochastic,
        )
    )  # fmt: skip


call_run = caller(tags=4)
"""Call `run` by its address."""


@kernel
def encode_rows(
    x, x_stride, run, bits, block, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, scale_step,
    first, last, cols, scratch, key0, key1, origin, row_words, sources,
):  # fmt: skip
    """Rowwise planes of MX formats and of NVFP4 with a scale per 16: x [rows, cols].

    ``run`` is the address of the kernel that encodes a row to codes of ``bits``, with a scale per ``block`` numbers.
    The global scales are read from ``encode_scales`` and ``decode_scales``, ``scale_step`` bytes apart
    from row to row: 0 where the whole tensor shares one. ``origin`` is the counter of the first random word,
    ``row_words`` the number of words from row to row.
    """
    best = 0
    for row in range(first, last):
        found = call_run(run, (
            x + row * x_stride, cols, codes + row * codes_stride, scales + row * scales_stride,
            load_f32(encode_scales + row * scale_step), load_f32(decode_scales + row * scale_step),
            scratch, origin + row * row_words, 1, key0, key1,
        ))  # fmt: skip
        best = max(best, found)
    return best
