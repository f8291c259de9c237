"""Several kernels in one call: measure a matrix, determine its global scales, encode it.

A program is a table of 64-bit words: a line for each call of a kernel, then the arguments of all calls, then their
results. Lines refer to arguments and results by their distance from the beginning of the table.
"""

from __future__ import annotations

import numpy as np

from .calling import caller
from .compiling import inner, kernel
from .elements import INFINITY_BITS
from .jobs import SLOT
from .simd import bits_of, float_of, load_f32, load_i32, load_i64, splat, store, store_i32, store_u8

LINE = 5  # words: the runner of the kernel (see `jobs`), the kernel, its arguments, its result, the largest result
REFUSED = -1

_call_runner = caller(tags=1)
_LARGEST_BITS = INFINITY_BITS - 1  # of the largest fp32 number
_LINE_BYTES = LINE * SLOT


@kernel
def program(table, first, last, tag):
    """Run the lines ``first:last``: returns the largest result, or REFUSED after a result above that of its line."""
    most = 0
    for line in range(first, last):
        at = table + line * _LINE_BYTES
        result = table + load_i64(at + 24)
        _call_runner(load_i64(at), (load_i64(at + 8), table + load_i64(at + 16), 1, 0, result))
        found = load_i64(result)
        if found > load_i64(at + 32):
            return REFUSED
        most = max(most, found)
    return most


@kernel
def two_level_scales(bits, amax, encode, decode, each_amax, count, bound, share, tag):
    """Write the global scales of a two-level format, ``count`` times each, from an amax.

    Args:
        bits: where the bits of the amax are.
        amax: where the plane has its amax.
        encode: where to write the scale to encode with.
        decode: where to write the scale to decode with.
        each_amax: where to write the amax.
        count: how often.
        bound: the largest number of the format.
        share: multiplies the scale to encode with.
        tag: any tag.
    """
    store_i32(amax, load_i32(bits))
    largest = load_f32(bits)
    scale, back = np.float32(1.0), np.float32(1.0)
    if largest != 0.0:
        scale = np.float32(np.float64(bound) / np.float64(largest))
        scale = min(scale, float_of(_LARGEST_BITS))
        if scale == 0.0:
            scale = np.float32(1.0)
        back = np.float32(1.0 / np.float64(scale))
    scale = np.float32(np.float64(scale) * np.float64(share))
    for i in range(count):
        store_i32(encode + i * 4, bits_of(scale))
        store_i32(decode + i * 4, bits_of(back))
        store_i32(each_amax + i * 4, bits_of(largest))
    return np.int64(0)


@kernel
def tensor_factor(bits, factor, other_factor, scale, target, epsilon, power_of_two, tag):
    """Write the scale of a per-tensor format, from an amax.

    Args:
        bits: where the bits of the amax are.
        factor: where to write the number to multiply with.
        other_factor: the same, once more.
        scale: where the plane has its scale, the reciprocal.
        target: the number that the amax becomes.
        epsilon: the least amax.
        power_of_two: whether the factor is a power of two.
        tag: any tag.
    """
    largest = max(load_f32(bits), epsilon)
    number = np.float32(1.0)
    if largest > 0.0 and bits_of(largest) < INFINITY_BITS:
        number = min(np.float32(np.float64(target) / np.float64(largest)), float_of(_LARGEST_BITS))
        if power_of_two:
            number = float_of(bits_of(number) & INFINITY_BITS)
    _store_tensor_scale(number, factor, other_factor, scale)
    return np.int64(0)


@kernel
def given_factor(given, factor, other_factor, scale, tag):
    """Write the scale of a per-tensor format, which is given.

    Args:
        given: where the number to multiply with is.
        factor: where to write that number.
        other_factor: the same, once more.
        scale: where the plane has its scale, the reciprocal.
        tag: any tag.

    Returns:
        0, or 1 if the number is zero, negative, infinite or a NaN.
    """
    number = load_f32(given)
    if not np.float32(0.0) < number < float_of(INFINITY_BITS):
        return np.int64(1)
    _store_tensor_scale(number, factor, other_factor, scale)
    return np.int64(0)


@inner
def _store_tensor_scale(number, factor, other_factor, scale):
    store_i32(factor, bits_of(number))
    store_i32(other_factor, bits_of(number))
    store_i32(scale, bits_of(np.float32(1.0 / np.float64(number))))


@kernel
def zeros(out, count, tag):
    """Write ``count`` bytes of zeros."""
    whole = count // 64 * 64
    for at in range(0, whole, 64):
        store(out + at, splat(0, 16, "i32"))
    for at in range(whole, count):
        store_u8(out + at, 0)
    return np.int64(0)


@kernel
def joint_factor(left_amax, right_amax, factor, left_bound, right_bound, tag):
    """Write the factor of a product of two operands of two-level formats: both their global scales.

    Args:
        left_amax: where the amax of the left operand is.
        right_amax: where that of the right operand is.
        factor: where to write the factor, fp32.
        left_bound: the largest number of the format of the left operand.
        right_bound: that of the right operand.
        tag: any tag.

    Returns:
        0, or 1 if the factor is not a number of fp32.
    """
    left = np.float64(load_f32(left_amax)) * (1.0 / np.float64(left_bound))
    right = np.float64(load_f32(right_amax)) * (1.0 / np.float64(right_bound))
    both = left * right
    if not abs(both) <= np.float64(float_of(_LARGEST_BITS)):
        return np.int64(1)
    store_i32(factor, bits_of(np.float32(both)))
    return np.int64(0)


@kernel
def note(number, out, tag):
    """Copy an fp32 number to where Python reads it after the program."""
    store_i32(out, load_i32(number))
    return np.int64(0)
