"""Casting and scaling on vectors: the arithmetic of the reference, without branches.

A magnitude is rounded by adding the power of two whose last bit is the grid step there: the sum's low
bits then count grid steps, rounded to nearest even by the addition itself. The codes of all magnitudes
are consecutive integers, so the count and the exponent add up to the code.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from ...formats import Element
from . import known
from .compiling import inner, overloaded
from .features import compiled_for
from .packing import pack_nibbles, pack_sixes, sixty_four_bytes, unpack_nibbles, unpack_sixes
from .simd import (
    Vector,
    as_float,
    as_int,
    bits_of,
    float_minimum,
    float_of,
    fused,
    in_sixteens,
    joined,
    load,
    load_bf16,
    maximum,
    minimum,
    narrow,
    to_float,
    where_greater,
    widen,
)
from .tags import Tag, TagType

INFINITY_BITS = 0x7F800000
FP32_MAX = np.float32(np.finfo(np.float32).max)


@lru_cache(maxsize=64)
def element_tag(element: Element) -> Tag:
    """The tag of an element that kernels know; a tag is a name, so there must be no other of that name."""
    if known.ELEMENTS.get(element.name) != element:
        raise ValueError(f"kernels do not know the element {element.name!r} as it is here: {element}")
    return Tag(element.name)


E4M3_TAG, E2M1_TAG = element_tag(known.E4M3), element_tag(known.E2M1)


def _element(tag: TagType) -> Element:
    return known.ELEMENTS[tag.tag]


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


# ---- inputs ------------------------------------------------------------------------------------------


def load_input(address, lanes, dtype):
    """``lanes`` numbers of the input as f32."""


@overloaded(load_input, prefer_literal=True)
def _load_input(address, lanes, dtype):
    if dtype.tag == "bf16":
        return lambda address, lanes, dtype: load_bf16(address, lanes)
    return lambda address, lanes, dtype: load(address, lanes, "f32")


def input_size(dtype):
    """Bytes of one number of the input."""


@overloaded(input_size)
def _input_size(dtype):
    size = 2 if dtype.tag == "bf16" else 4
    return lambda dtype: size


def magnitude_bits(v, with_nan):
    """The bits of |v|, by which magnitudes are compared; NaNs count as 0 if there may be any."""


@overloaded(magnitude_bits)
def _magnitude_bits(v, with_nan):
    if with_nan.tag == "no":
        return lambda v, with_nan: as_int(v) & 0x7FFFFFFF

    def ignoring_nan(v, with_nan):
        bits = as_int(v) & 0x7FFFFFFF
        return where_greater(bits, INFINITY_BITS, 0, bits)

    return ignoring_nan


# ---- casts -------------------------------------------------------------------------------------------


def encode_element(v, element, with_nan):
    """f32 -> codes in i32 lanes: nearest even, saturating; NaN only where there may be any."""


@overloaded(encode_element)
def _encode_element(v, element, with_nan):
    e = _element(element)
    max_bits = float_bits(e.max)
    shift = 23 - e.mantissa_bits
    smallest_normal = (127 + e.min_exponent) << 23
    offset = (127 + e.min_exponent + shift) << e.mantissa_bits
    to_rounding = shift << 23
    sign_shift, sign_bit = 32 - e.bits, e.sign_bit
    nan_code = e.nan_code

    def without_nan(v, element, with_nan):
        bits = as_int(v)
        magnitude = minimum(bits & 0x7FFFFFFF, max_bits)
        rounding = maximum(magnitude & INFINITY_BITS, smallest_normal) + to_rounding
        steps = as_int(as_float(magnitude) + as_float(rounding)) - rounding
        return ((steps + (rounding >> shift)) - offset) | ((bits >> sign_shift) & sign_bit)

    if with_nan.tag == "no":
        return without_nan

    def maybe_nan(v, element, with_nan):
        bits = as_int(v)
        magnitude = minimum(bits & 0x7FFFFFFF, max_bits)
        rounding = maximum(magnitude & INFINITY_BITS, smallest_normal) + to_rounding
        steps = as_int(as_float(magnitude) + as_float(rounding)) - rounding
        code = ((steps + (rounding >> shift)) - offset) | ((bits >> sign_shift) & sign_bit)
        return where_greater(bits & 0x7FFFFFFF, INFINITY_BITS, nan_code, code)

    return maybe_nan


def rounded_sums(v, element):
    """The bits of f32 sums by which numbers are rounded to the grid, in i32 lanes.

    For what needs no saturation and is no NaN. It is `encode_element` with the constants folded into one product: what
    is added to round is a power of two with a small even number in its last bits, so that the count of grid steps in
    the low bits and the exponent add up to the code, modulo the codes that there are.
    """


@overloaded(rounded_sums)
def _rounded_sums(v, element):
    to_rounding = _to_rounding(_element(element))

    def add(v, element):
        magnitude = as_float(as_int(v) & 0x7FFFFFFF)
        return as_int(fused(_power_at(magnitude, element), to_rounding, magnitude))

    return add


def _to_rounding(e: Element) -> np.float32:
    """By what the power of two at or below a number is multiplied, and added to it to round it."""
    shift = 23 - e.mantissa_bits
    offset = (127 + e.min_exponent + shift) << e.mantissa_bits
    assert offset % 2 == 0  # ties go to the even code, so an odd number would turn them round
    return np.uint32((127 + shift) << 23 | -offset % (1 << e.bits)).view(np.float32)


def _power_at(magnitude, element):
    """The power of two at or below a magnitude, at least that of the smallest normal number."""


@overloaded(_power_at)
def _power_at_magnitude(magnitude, element):
    e = _element(element)
    smallest_normal = (127 + e.min_exponent) << 23
    return lambda magnitude, element: as_float(maximum(as_int(magnitude) & INFINITY_BITS, smallest_normal))


def rounded_to_grid(magnitude, element):
    """Loose codes of magnitudes that need no saturation, and the numbers that they stand for."""


@overloaded(rounded_to_grid)
def _rounded_to_grid(magnitude, element):
    to_rounding = _to_rounding(_element(element))
    back, shift = -to_rounding, 23 - _element(element).mantissa_bits

    def rounded(magnitude, element):
        power = _power_at(magnitude, element)
        sum_ = fused(power, to_rounding, magnitude)
        bits = as_int(sum_)
        return (bits >> shift) + bits, fused(power, back, sum_)

    return rounded


def loose_codes(v, element):
    """f32 -> i32 lanes whose lowest bits are the codes; the bits above are anything. As `rounded_sums`."""


@overloaded(loose_codes)
def _loose_codes(v, element):
    e = _element(element)
    shift, sign_shift, sign_bit = 23 - e.mantissa_bits, 32 - e.bits, e.sign_bit

    def encode(v, element):
        sums = rounded_sums(v, element)
        return ((sums >> shift) + sums) | ((as_int(v) >> sign_shift) & sign_bit)

    return encode


def saturated_codes(v, element):
    """f32 -> i32 lanes whose lowest bits are the codes, saturated; the bits above are anything. Not for NaN."""


@overloaded(saturated_codes)
def _saturated_codes(v, element):
    sign_shift, sign_bit = 32 - _element(element).bits, _element(element).sign_bit

    def encode(v, element):
        bits = as_int(v)
        codes, _ = rounded_to_grid(up_to_max(as_float(bits & 0x7FFFFFFF), element), element)
        return codes | ((bits >> sign_shift) & sign_bit)

    return encode


def loose_bytes(v, element):
    """f32 -> bytes of an element of 8 bits. As `rounded_sums`."""


@overloaded(loose_bytes)
def _loose_bytes(v, element):
    if v.lanes == 64 and compiled_for("avx512bw"):
        return lambda v, element: sixty_four_bytes(v, rounded_sums(v, element), element)
    return lambda v, element: narrow(loose_codes(v, element))


@intrinsic
def _look_up(typing_context, codes, element):
    """Codes of four bits in i32 lanes -> f32: one instruction for 16 of them."""
    result = Vector("f32", codes.lanes)
    numbers = [float(number) for number in _element(element).values()]

    def generate(context, builder, signature, args):
        floats = Vector("f32", 16).llvm
        function = ir.FunctionType(floats, [floats, Vector("i32", 16).llvm])
        permute = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512.permvar.sf.512")
        table = ir.Constant(floats, numbers)
        return joined(builder, [builder.call(permute, [table, part]) for part in in_sixteens(builder, args[0])])

    return result(codes, element), generate


def decode_element(codes, element):
    """Codes in i32 lanes -> f32."""


@overloaded(decode_element)
def _decode_element(codes, element):
    e = _element(element)
    if e.bits == 4 and codes.lanes % 16 == 0 and compiled_for("avx512f"):
        return lambda codes, element: _look_up(codes, element)
    mask, sign_bit, sign_shift = e.magnitude_mask, e.sign_bit, 32 - e.bits
    shift, last_subnormal, last_finite = 23 - e.mantissa_bits, (1 << e.mantissa_bits) - 1, e.max_code
    rebias = (127 - e.bias) << 23
    step = np.float32(2.0 ** (e.min_exponent - e.mantissa_bits))

    def finite(codes, element):
        magnitude = codes & mask
        subnormal = as_int(to_float(magnitude) * step)  # not through fp32 subnormals: those are slow
        bits = where_greater(magnitude, last_subnormal, (magnitude << shift) + rebias, subnormal)
        return as_float(bits | ((codes & sign_bit) << sign_shift))

    if e.specials == "none":
        return finite

    def with_specials(codes, element):
        magnitude = codes & mask
        subnormal = as_int(to_float(magnitude) * step)
        bits = where_greater(magnitude, last_subnormal, (magnitude << shift) + rebias, subnormal)
        bits = where_greater(magnitude, last_finite, (magnitude << shift) | INFINITY_BITS, bits)
        return as_float(bits | ((codes & sign_bit) << sign_shift))

    return with_specials


def pack_codes(codes, element):
    """Codes in i32 lanes -> the bytes they are stored in, first code lowest."""


@overloaded(pack_codes)
def _pack_codes(codes, element):
    if _element(element).bits == 4:
        return lambda codes, element: pack_nibbles(codes)
    if _element(element).bits == 6:
        return lambda codes, element: pack_sixes(codes)
    return lambda codes, element: narrow(codes)


def load_codes(address, lanes, element):
    """``lanes`` stored codes -> i32 lanes."""


@overloaded(load_codes, prefer_literal=True)
def _load_codes(address, lanes, element):
    bits = _element(element).bits
    stored = lanes.literal_value * bits // 8
    if bits == 4:
        return lambda address, lanes, element: unpack_nibbles(load(address, stored, "u8"))
    if bits == 6:
        return lambda address, lanes, element: unpack_sixes(load(address, stored, "u8"))
    return lambda address, lanes, element: widen(load(address, stored, "u8"))


def bytes_of_codes(count, element):
    """Bytes that ``count`` codes take; whole blocks fill whole bytes."""


@overloaded(bytes_of_codes)
def _bytes_of_codes(count, element):
    bits = _element(element).bits
    return lambda count, element: count * bits // 8


# ---- scales ------------------------------------------------------------------------------------------


def reciprocal_of_max(element):
    """fp32(1 / largest number)."""


@overloaded(reciprocal_of_max)
def _reciprocal_of_max(element):
    reciprocal = np.float32(1.0 / _element(element).max)
    return lambda element: reciprocal


def e8m0_byte(amax, element, rule):
    """E8M0 byte of a block, from the bits of its amax, by the scale rule that the tag names."""


@overloaded(e8m0_byte)
def _e8m0_byte(amax, element, rule):
    if rule.tag == "e8m0_up":
        return lambda amax, element, rule: e8m0_up(bits_of(float_of(amax) * reciprocal_of_max(element)))
    top = _element(element).max_exponent
    return lambda amax, element, rule: min(max((amax >> 23) - top, 0), 254)


def e8m0_bytes(amax, element, rule):
    """`e8m0_byte` of several blocks (i32 lanes)."""


@overloaded(e8m0_bytes)
def _e8m0_bytes(amax, element, rule):
    if rule.tag == "e8m0_up":
        return lambda amax, element, rule: e8m0_up_vector(as_float(amax) * reciprocal_of_max(element))
    top = _element(element).max_exponent
    return lambda amax, element, rule: minimum(maximum((amax >> 23) - top, 0), 254)


@inner
def e8m0_up(product_bits):
    """E8M0 byte of the power of two at or above a product (its fp32 bits)."""
    if product_bits <= 0x400000:
        return 0
    return min((product_bits + 0x7FFFFF) >> 23, 254)


@inner
def e8m0_reciprocal(byte):
    """2**(127 - byte) as f32; byte <= 254."""
    return float_of(max((254 - byte) << 23, 0x400000))


@inner
def e8m0_value(byte):
    """2**(byte - 127) as f32; 255 is NaN."""
    if byte == 255:
        return float_of(0x7FC00000)
    return float_of(max(byte << 23, 0x400000))


@inner
def e8m0_up_vector(product):
    """`e8m0_up` of a vector of f32 products, in i32 lanes."""
    bits = as_int(product)
    rounded = minimum((bits + 0x7FFFFF) >> 23, 254)
    return where_greater(bits, 0x400000, rounded, 0)


@inner
def e8m0_reciprocal_vector(byte):
    return as_float(maximum((byte * -1 + 254) << 23, 0x400000))


@inner
def e8m0_value_vector(byte):
    """2**(byte - 127) of bytes in i32 lanes; 255 is NaN."""
    value = maximum(byte << 23, 0x400000)
    return as_float(where_greater(byte, 254, 0x7FC00000, value))


def up_to_max(magnitude, element):
    """Saturated magnitudes."""


@overloaded(up_to_max)
def _up_to_max(magnitude, element):
    max_bits = float_bits(_element(element).max)
    return lambda magnitude, element: as_float(minimum(as_int(magnitude), max_bits))


@inner
def at_most_fp32_max(v):
    return float_minimum(v, FP32_MAX)
