"""The reference's random bytes, on vectors: a hash of keys and position, four bytes a hash."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .compiling import inner, overloaded
from .elements import INFINITY_BITS, _element, encode_element, float_bits
from .simd import (
    Vector,
    as_bytes,
    as_float,
    as_int,
    maximum,
    minimum,
    splat,
    to_float,
    to_int,
    where_greater,
    widen,
)


@intrinsic(prefer_literal=True)
def lane_numbers(typing_context, lanes):
    """0, 1, 2, ... in i32 lanes."""
    vector = Vector("i32", lanes.literal_value)

    def generate(context, builder, signature, args):
        return ir.Constant(vector.llvm, list(range(vector.lanes)))

    return vector(lanes), generate


@inner
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@inner
def hash_counters(counters, key0, key1):
    """32 random bits for each counter below 2**32 (i32 lanes)."""
    return _mix(_mix(counters ^ key0) ^ key1)


def random_bytes(counter, step, key0, key1, words, stochastic):
    """Random bytes of neighbours along a block, four a word, whose counters are ``step`` apart.

    There is nothing to draw where rounding is to nearest.
    """


@overloaded(random_bytes, prefer_literal=True)
def _random_bytes(counter, step, key0, key1, words, stochastic):
    if stochastic.tag == "no":
        return lambda counter, step, key0, key1, words, stochastic: splat(0, 1, "u8")

    def draw(counter, step, key0, key1, words, stochastic):
        return as_bytes(hash_counters(lane_numbers(words) * step + counter, key0, key1))

    return draw


def rounded(v, random, element, stochastic, with_nan):
    """Codes of f32 numbers: to nearest, or stochastically by as many random bytes (u8 lanes)."""


@overloaded(rounded)
def _rounded(v, random, element, stochastic, with_nan):
    if stochastic.tag == "no":
        return lambda v, random, element, stochastic, with_nan: encode_element(v, element, with_nan)
    if with_nan.tag == "no":
        return lambda v, random, element, stochastic, with_nan: encode_stochastically(v, widen(random), element)
    nan_code = _element(element).nan_code

    def maybe_nan(v, random, element, stochastic, with_nan):
        code = encode_stochastically(v, widen(random), element)
        return where_greater(as_int(v) & 0x7FFFFFFF, INFINITY_BITS, nan_code, code)

    return maybe_nan


def encode_stochastically(v, random_byte, element):
    """f32 -> codes, rounded up with the probability of its place between neighbours (not for NaN).

    ``random_byte`` (i32 lanes, 0 to 255) is that part of a grid step which is added before rounding down.
    """


@overloaded(encode_stochastically)
def _encode_stochastically(v, random_byte, element):
    e = _element(element)
    max_bits, mantissa = float_bits(e.max), e.mantissa_bits
    first_exponent = 127 + e.min_exponent
    sign_shift, sign_bit = 32 - e.bits, e.sign_bit
    byte_weight = 1.0 / 256.0

    def encode(v, random_byte, element):
        bits = as_int(v)
        magnitude = minimum(bits & 0x7FFFFFFF, max_bits)
        exponent = maximum(magnitude >> 23, first_exponent)
        step = as_float((exponent - mantissa) << 23)
        moved = as_int(as_float(magnitude) + (to_float(random_byte) * byte_weight) * step)
        moved = minimum(moved, max_bits)
        exponent = maximum(moved >> 23, first_exponent)
        per_step = as_float(((exponent * -1) + (254 + mantissa)) << 23)  # 1 / step, there
        steps = to_int(as_float(moved) * per_step)
        return (((exponent - first_exponent) << mantissa) + steps) | ((bits >> sign_shift) & sign_bit)

    return encode
