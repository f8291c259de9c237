"""Sixteen NVFP4 blocks of 16 at a time: lane b of vector i is number i of block b.

Columns of a matrix lie like that; rows are turned first. All blocks are worked on side by side, and their
codes end up in two words for each lane. Words of eight such sixteens are turned to lines of the result.
"""

from __future__ import annotations

import numpy as np

from .compiling import inner, overloaded
from .elements import (
    E2M1_TAG,
    E4M3_TAG,
    INFINITY_BITS,
    at_most_fp32_max,
    decode_element,
    encode_element,
    float_bits,
    load_input,
    rounded_to_grid,
    saturated_codes,
    up_to_max,
)
from .features import compiled_for
from .known import E2M1, E4M3
from .random_bits import encode_stochastically, hash_counters, lane_numbers
from .simd import (
    as_float,
    as_int,
    corrected,
    float_minimum,
    largest,
    load,
    opaque,
    remainder_by,
    splat,
    store,
    sum_of_halves,
    where_greater,
    where_less,
)
from .tags import F32, NO
from .tiles import amax_of_rows, load_rows, rotate_rows, scale_rows, store_columns, store_rows, transpose_rows


def rotated(rows, rotation):
    """Rows after the rotation that the tag names, if any."""


@overloaded(rotated)
def _rotated(rows, rotation):
    if rotation.tag == "none":
        return lambda rows, rotation: rows
    mask = int(rotation.tag)
    return lambda rows, rotation: rotate_rows(rows, mask)


def encode_blocks(
    buffer, stride, words, scales, encode_scale, decode_scale, amax, bound, square,
    counter, lane_step, word_step, key0, key1, dtype, rotation, stochastic, four_over_six,
):  # fmt: skip
    """Vectors ``stride`` bytes apart -> words of 8 codes each, two for each block, and the bytes of their scales.

    First the first words of all blocks are written, then the second ones; scales are i32 lanes.
    Returns the bits of the largest magnitude; if those are of a NaN, nothing is written.

    ``encode_scale``, ``decode_scale`` and ``amax`` are the global ones of each lane, ``amax`` and ``bound``
    (the largest product of code and block scale) of use for 4-over-6 only. ``square``: the 16 blocks are a
    tile and share one scale. The counter of a random word grows by ``lane_step`` from block to block and by
    ``word_step`` from four numbers to the next four.
    """


@overloaded(encode_blocks)
def _encode_blocks(
    buffer, stride, words, scales, encode_scale, decode_scale, amax, bound, square,
    counter, lane_step, word_step, key0, key1, dtype, rotation, stochastic, four_over_six,
):  # fmt: skip
    def nearest_or_stochastic(
        buffer, stride, words, scales, encode_scale, decode_scale, amax, bound, square,
        counter, lane_step, word_step, key0, key1, dtype, rotation, stochastic, four_over_six,
    ):  # fmt: skip
        rows = rotated(load_rows(buffer, stride, 16, dtype), rotation)
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
        store(words, low)
        store(words + 64, high)
        store(scales, stored)
        return best

    def better_of_two(
        buffer, stride, words, scales, encode_scale, decode_scale, amax, bound, square,
        counter, lane_step, word_step, key0, key1, dtype, rotation, stochastic, four_over_six,
    ):  # fmt: skip
        largest_bits = _block_amax(amax_of_rows(load_rows(buffer, stride, 16, dtype)), square)
        best = largest(largest_bits)
        if best > INFINITY_BITS:
            return best
        wanted = (as_float(largest_bits) / CODE_MAX) * encode_scale
        six, factor6 = _scales(float_minimum(wanted, SCALE_MAX), decode_scale)
        four, factor4 = _scales(float_minimum(wanted * STRETCH, SCALE_MAX), decode_scale)
        scale6, scale4 = decode_element(six, E4M3_TAG), decode_element(four, E4M3_TAG)
        safe, middle, zero = _is_safe(amax), opaque(8), splat(np.float32(0.0), 16, "f32")
        low6, low4, low_signs, error6, error4 = _both_words(
            buffer, stride, 0, middle, scale6, factor6, scale4, factor4, amax, bound, safe, zero, zero,
            dtype, four_over_six,
        )  # fmt: skip
        high6, high4, high_signs, error6, error4 = _both_words(
            buffer, stride, middle, 16, scale6, factor6, scale4, factor4, amax, bound, safe, error6, error4,
            dtype, four_over_six,
        )  # fmt: skip
        if square:
            error6 = splat(sum_of_halves(error6), 16, "f32")
            error4 = splat(sum_of_halves(error4), 16, "f32")
        low = where_less(error4, error6, low4, low6) | low_signs
        high = where_less(error4, error6, high4, high6) | high_signs
        store(words, low)
        store(words + 64, high)
        store(scales, where_less(error4, error6, four, six))
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
        return lambda row, random_byte, stochastic: saturated_codes(row, E2M1_TAG)
    return lambda row, random_byte, stochastic: encode_stochastically(row, random_byte, E2M1_TAG)


@inner
def _word(a, b, c, d, e, f, g, h, random0, random1, stochastic):
    """Codes of 8 rows in one i32: row 0 in the lowest nibble. Four rows share a random word, a byte each."""
    word = appended(splat(0, 16, "i32"), code(a, random0 & 0xFF, stochastic))
    word = appended(word, code(b, (random0 >> 8) & 0xFF, stochastic))
    word = appended(word, code(c, (random0 >> 16) & 0xFF, stochastic))
    word = appended(word, code(d, random0 >> 24, stochastic))
    word = appended(word, code(e, random1 & 0xFF, stochastic))
    word = appended(word, code(f, (random1 >> 8) & 0xFF, stochastic))
    word = appended(word, code(g, (random1 >> 16) & 0xFF, stochastic))
    return appended(word, code(h, random1 >> 24, stochastic))


@inner
def appended(word, codes):
    """Words whose codes so far are moved down, with the low four bits of ``codes`` on top."""
    return (word >> 4) | (codes << 28)


# ---- 4-over-6 ----------------------------------------------------------------------------------------

LEAST_SAFE, MOST_SAFE = float_bits(2.0**-64), float_bits(2.0**64)
CODE_MAX, SCALE_MAX, STRETCH = np.float32(E2M1.max), np.float32(E4M3.max), np.float32(1.5)


@inner
def _both_words(
    buffer, stride, first, last, scale6, factor6, scale4, factor4, amax, bound, safe, error6, error4, dtype, measure,
):  # fmt: skip
    """Of 8 numbers of each block: codes without signs under both scales, signs, and errors added up, one by one."""
    word6, word4, signs = splat(0, 16, "i32"), splat(0, 16, "i32"), splat(0, 16, "i32")
    for row in range(first, last):
        bits = as_int(load_input(buffer + row * stride, 16, dtype))
        magnitude = as_float(bits & 0x7FFFFFFF)
        codes6, number6 = rounded_to_grid(up_to_max(magnitude * factor6, E2M1_TAG), E2M1_TAG)
        codes4, number4 = rounded_to_grid(up_to_max(magnitude * factor4, E2M1_TAG), E2M1_TAG)
        word6, word4 = appended(word6, codes6), appended(word4, codes4)
        signs = (signs >> 4) | (bits & 0x80000000)
        error6 = error6 + magnitude_of_error(divided(number6 * scale6 * amax, bound, safe) - magnitude, measure)
        error4 = error4 + magnitude_of_error(divided(number4 * scale4 * amax, bound, safe) - magnitude, measure)
    return word6, word4, signs, error6, error4


def divided(x, bound, safe):
    """Quotients of f32 numbers. ``safe``: neither the numbers nor the quotients are very small or very large."""


@overloaded(divided)
def _divided(x, bound, safe):
    if not compiled_for("fma"):
        return lambda x, bound, safe: x / bound

    def by_reciprocal(x, bound, safe):
        """By Markstein: a product that may be off by a last place, mended by its remainder. A division takes longer."""
        if not safe:
            return x / bound
        reciprocal = np.float32(1.0) / bound
        quotient = x * reciprocal
        return corrected(quotient, remainder_by(x, quotient, bound), reciprocal)

    return by_reciprocal


@inner
def _is_safe(amax):
    """Whether numbers under these amaxes may be `divided` by their reciprocal: none is zero, tiny, huge or NaN."""
    bits = as_int(amax)
    return largest(where_greater(bits, LEAST_SAFE, where_greater(bits, MOST_SAFE, 1, splat(0, 16, "i32")), 1)) == 0


def magnitude_of_error(difference, measure):
    """Absolute (MAE) or squared (MSE)."""


@overloaded(magnitude_of_error)
def _magnitude_of_error(difference, measure):
    if measure.tag == "MAE":
        return lambda difference, measure: as_float(as_int(difference) & 0x7FFFFFFF)
    return lambda difference, measure: difference * difference


# ---- sixteen lines of eight blocks -------------------------------------------------------------------


@inner
def note_scales(scales, stored, group):
    """Put the byte ``group`` of 16 lines, each of 8 bytes, from i32 lanes; groups come one after the other."""
    at, place = scales + group // 4 * 64, group % 4
    before = splat(0, 16, "i32") if place == 0 else load(at, 16, "i32")
    store(at, before | (stored << (8 * place)))


@inner
def write_lines(words, noted, groups, codes, codes_stride, scales, scales_stride, scratch):
    """Write 16 lines of up to 8 blocks: words [2 * groups, 16] of codes, and their noted scales.

    ``scratch`` is 1024 bytes, for lines that are not full.
    """
    turned = transpose_rows(load_rows(words, 64, 16, F32))
    low, high = load(noted, 16, "i32"), load(noted + 64, 16, "i32")
    if groups == 8:
        store_rows(codes, codes_stride, turned)
        store_columns(scales, scales_stride, low, high)
        return
    store_rows(scratch, 64, turned)
    for line in range(16):
        for group in range(groups):
            store(codes + line * codes_stride + group * 8, load(scratch + line * 64 + group * 8, 8, "u8"))
    store_columns(scratch, 8, low, high)
    for line in range(16):
        for group in range(groups):
            store(scales + line * scales_stride + group, load(scratch + line * 8 + group, 1, "u8"))
