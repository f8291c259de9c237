"""Scales of blocks from their amaxes: the rules of `reference.scaling`, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import (
    FP32_MAX,
    FROM_E4M3,
    at_most_fp32,
    bits_of,
    e8m0_reciprocal,
    e8m0_value,
    element_values,
    float_of,
    fp8_or_software_codes,
    hardware_fp8_values,
    reciprocal,
)


@triton.jit
def fp32_factor(amax, KIND: tl.constexpr):
    """The fp32 number by which numbers are multiplied; 1 if the amax is 0, infinite or NaN. It is not stored."""
    if KIND.epsilon > 0.0:
        amax = tl.where(amax < KIND.epsilon, KIND.epsilon, amax)
    usable = (amax > 0) & (amax <= FP32_MAX)
    divisor = tl.where(usable, amax, 1.0)
    factor = tl.div_rn(tl.full(amax.shape, KIND.target, tl.float32), divisor)
    factor = tl.where(factor > FP32_MAX, KIND.overflow, factor)
    if KIND.power_of_two:
        factor = float_of(bits_of(factor) & -0x800000)
    return tl.where(usable, factor, 1.0)


@triton.jit
def e8m0_code(amax, PLANE: tl.constexpr):
    """The E8M0 bytes (int32) of blocks, by the rule of the plane."""
    if PLANE.rule == "e8m0_up":
        b = bits_of(amax * PLANE.max_reciprocal)
        code = tl.where(b <= 0x400000, 0, (b + 0x7FFFFF) >> 23)
        return tl.minimum(code, 254)
    else:
        code = (bits_of(amax) >> 23) - PLANE.max_exponent
        return tl.minimum(tl.maximum(code, 0), 254)


@triton.jit
def block_scale(amax, KIND: tl.constexpr):
    """What is stored for blocks of one level of scales (fp32, or an E8M0 byte in int32), and the factor."""
    PLANE: tl.constexpr = KIND.plane
    if PLANE.rule == "fp32":
        factor = fp32_factor(amax, KIND)
        return reciprocal(factor), factor
    else:
        code = e8m0_code(amax, PLANE)
        return code, e8m0_reciprocal(code)


@triton.jit
def global_encode_scale(amax, PLANE: tl.constexpr):
    """The scale of the whole tensor, or of a row, of two-level formats: 1 where the amax is 0 or infinite."""
    encode = at_most_fp32(tl.div_rn(tl.full(amax.shape, PLANE.bound, tl.float32), amax))
    return tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)


@triton.jit
def stored_block_scale(wanted, decode, PLANE: tl.constexpr):
    """``wanted`` rounded to the element of block scales (uint8), its value, and the factor that undoes both scales."""
    code = fp8_or_software_codes(wanted, PLANE.scale_element, PLANE.hardware.fp8)
    value = element_values(code.to(tl.int32), PLANE.scale_element)
    return code, value, at_most_fp32(reciprocal(value * decode))


@triton.jit
def decode_factor(stored, amax, PLANE: tl.constexpr):
    """The number by which decoded elements are multiplied. ``stored`` are fp32 numbers, or bytes."""
    if PLANE.rule == "fp32":
        return stored
    elif PLANE.rule == "two_level":
        return (block_scale_values(stored, PLANE) * amax) * PLANE.bound_reciprocal
    else:
        return e8m0_value(stored.to(tl.int32))


@triton.jit
def block_scale_values(stored, PLANE: tl.constexpr):
    """fp32 numbers of the bytes of block scales, for two-level scales."""
    if PLANE.hardware.fp8 and PLANE.scale_element.is_e4m3:
        return hardware_fp8_values(stored, FROM_E4M3)
    else:
        return element_values(stored.to(tl.int32), PLANE.scale_element)
