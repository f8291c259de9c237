"""Sixteen NVFP4 blocks of 16 at a time: lane b of vector i is number i of block b.

Columns of a matrix lie like that; rows are turned first. All blocks are worked on side by side, and their
codes end up in two words for each lane.
"""

from __future__ import annotations

import numpy as np

from .compiling import inner, overloaded
from .elements import E2M1_TAG, E4M3_TAG, INFINITY_BITS, at_most_fp32_max, decode_element, encode_element
from .known import E2M1, E4M3
from .random_bits import encode_stochastically, hash_counters, lane_numbers
from .simd import as_float, as_int, float_minimum, largest, load, splat, sum_of_halves, where_less
from .tags import F32, NO
from .tiles import amax_of_rows, load_rows, rotate_rows, scale_rows, store_column_bytes, store_columns


def rotated(rows, rotation):
    """Rows after the rotation that the tag names, if any."""


@overloaded(rotated)
def _rotated(rows, rotation):
    if rotation.tag == "none":
        return lambda rows, rotation: rows
    mask = int(rotation.tag)
    return lambda rows, rotation: rotate_rows(rows, mask)


def encode_blocks(
    buffer, stride, codes, codes_step, scales, scales_step, encode_scale, decode_scale, amax, bound, square,
    counter, lane_step, word_step, key0, key1, rotation, stochastic, four_over_six,
):  # fmt: skip
    """Vectors ``stride`` bytes apart -> 8 bytes of codes and a scale of each block.

    Returns the bits of the largest magnitude; if those are of a NaN, nothing is written.

    ``encode_scale``, ``decode_scale`` and ``amax`` are the global ones of each lane, ``amax`` and ``bound``
    (the largest product of code and block scale) of use for 4-over-6 only. ``square``: the 16 blocks are a
    tile and share one scale. The counter of a random word grows by ``lane_step`` from block to block and by
    ``word_step`` from four numbers to the next four.
    """


@overloaded(encode_blocks)
def _encode_blocks(
    buffer, stride, codes, codes_step, scales, scales_step, encode_scale, decode_scale, amax, bound, square,
    counter, lane_step, word_step, key0, key1, rotation, stochastic, four_over_six,
):  # fmt: skip
    def nearest_or_stochastic(
        buffer, stride, codes, codes_step, scales, scales_step, encode_scale, decode_scale, amax, bound, square,
        counter, lane_step, word_step, key0, key1, rotation, stochastic, four_over_six,
    ):  # fmt: skip
        rows = rotated(load_rows(buffer, stride, 16, F32), rotation)
        largest_bits = _block_amax(amax_of_rows(rows), square)
        best = largest(largest_bits)
        if best > INFINITY_BITS:
            return best
        wanted = at_most_fp32_max(as_float(largest_bits) * encode_scale)
        stored, factor = _scales(wanted, decode_scale)
        r = scale_rows(rows, factor)
        r0 = random_words(counter, lane_step, key0, key1, stochastic)
        r1 = random_words(counter + word_step, lane_step, key0, key1, stochastic)
        r2 = random_words(counter + 2 * word_step, lane_step, key0, key1, stochastic)
        r3 = random_words(counter + 3 * word_step, lane_step, key0, key1, stochastic)
        low = _word(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r0, r1, stochastic)
        high = _word(r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15], r2, r3, stochastic)
        store_columns(codes, codes_step, low, high)
        store_column_bytes(scales, scales_step, stored)
        return best

    def better_of_two(
        buffer, stride, codes, codes_step, scales, scales_step, encode_scale, decode_scale, amax, bound, square,
        counter, lane_step, word_step, key0, key1, rotation, stochastic, four_over_six,
    ):  # fmt: skip
        largest_bits = _block_amax(amax_of_rows(load_rows(buffer, stride, 16, F32)), square)
        best = largest(largest_bits)
        if best > INFINITY_BITS:
            return best
        wanted = (as_float(largest_bits) / CODE_MAX) * encode_scale
        six, factor = _scales(float_minimum(wanted, SCALE_MAX), decode_scale)
        low6, high6, error6 = _candidate(buffer, stride, six, factor, amax, bound, four_over_six)
        four, factor = _scales(float_minimum(wanted * STRETCH, SCALE_MAX), decode_scale)
        low4, high4, error4 = _candidate(buffer, stride, four, factor, amax, bound, four_over_six)
        if square:
            error6 = splat(sum_of_halves(error6), 16, "f32")
            error4 = splat(sum_of_halves(error4), 16, "f32")
        low, high = where_less(error4, error6, low4, low6), where_less(error4, error6, high4, high6)
        store_columns(codes, codes_step, low, high)
        store_column_bytes(scales, scales_step, where_less(error4, error6, four, six))
        return best

    return nearest_or_stochastic if four_over_six.tag == "none" else better_of_two


@inner
def _block_amax(amax, square):
    return splat(largest(amax), 16, "i32") if square else amax


@inner
def _scales(wanted, decode_scale):
    """Stored E4M3 bytes (i32 lanes) and encode factors."""
    stored = encode_element(wanted, E4M3_TAG, NO)
    unit = splat(np.float32(1.0), 16, "f32")
    return stored, at_most_fp32_max(unit / (decode_element(stored, E4M3_TAG) * decode_scale))


# ---- codes -------------------------------------------------------------------------------------------


def random_words(counter, lane_step, key0, key1, stochastic):
    """A random word for each block; nothing where rounding is to nearest."""


@overloaded(random_words)
def _random_words(counter, lane_step, key0, key1, stochastic):
    if stochastic.tag == "no":
        return lambda counter, lane_step, key0, key1, stochastic: splat(0, 16, "i32")

    def draw(counter, lane_step, key0, key1, stochastic):
        return hash_counters(lane_numbers(16) * lane_step + counter, key0, key1)

    return draw


def code(row, random_byte, stochastic):
    """Nearest or stochastic."""


@overloaded(code)
def _code(row, random_byte, stochastic):
    if stochastic.tag == "no":
        return lambda row, random_byte, stochastic: encode_element(row, E2M1_TAG, NO)
    return lambda row, random_byte, stochastic: encode_stochastically(row, random_byte, E2M1_TAG)


@inner
def _word(a, b, c, d, e, f, g, h, random0, random1, stochastic):
    """Codes of 8 rows in one i32: row 0 in the lowest nibble. Four rows share a random word, a byte each."""
    return (
        code(a, random0 & 0xFF, stochastic)
        | (code(b, (random0 >> 8) & 0xFF, stochastic) << 4)
        | (code(c, (random0 >> 16) & 0xFF, stochastic) << 8)
        | (code(d, random0 >> 24, stochastic) << 12)
        | (code(e, random1 & 0xFF, stochastic) << 16)
        | (code(f, (random1 >> 8) & 0xFF, stochastic) << 20)
        | (code(g, (random1 >> 16) & 0xFF, stochastic) << 24)
        | (code(h, random1 >> 24, stochastic) << 28)
    )


# ---- 4-over-6 ----------------------------------------------------------------------------------------

CODE_MAX, SCALE_MAX, STRETCH = np.float32(E2M1.max), np.float32(E4M3.max), np.float32(1.5)


@inner
def _candidate(buffer, stride, stored, factor, amax, bound, measure):
    """Two words of codes for each block, and their error, added up number after number."""
    scale = decode_element(stored, E4M3_TAG)
    error = splat(np.float32(0.0), 16, "f32")
    low, high = splat(0, 16, "i32"), splat(0, 16, "i32")
    for row in range(8):
        v = load(buffer + row * stride, 16, "f32")
        codes = encode_element(v * factor, E2M1_TAG, NO)
        low = low | (codes << (4 * row))
        error = error + _error(codes, v, scale, amax, bound, measure)
    for row in range(8):
        v = load(buffer + (8 + row) * stride, 16, "f32")
        codes = encode_element(v * factor, E2M1_TAG, NO)
        high = high | (codes << (4 * row))
        error = error + _error(codes, v, scale, amax, bound, measure)
    return low, high, error


@inner
def _error(codes, v, scale, amax, bound, measure):
    decoded = decode_element(codes, E2M1_TAG) * scale
    return magnitude_of_error((decoded * amax) / bound - v, measure)


def magnitude_of_error(difference, measure):
    """Absolute (MAE) or squared (MSE)."""


@overloaded(magnitude_of_error)
def _magnitude_of_error(difference, measure):
    if measure.tag == "MAE":
        return lambda difference, measure: as_float(as_int(difference) & 0x7FFFFFFF)
    return lambda difference, measure: difference * difference
