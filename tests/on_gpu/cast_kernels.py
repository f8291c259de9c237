"""Kernels that cast every fp32 number in a range of bit patterns, with the functions that the library's kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

from crossgrain.kernels.triton.device.bits import (
    float_of,
    fp8_or_software_codes,
    hardware_fp4_codes,
    rounded_to_bf16,
    stochastic_codes,
)


@triton.jit(do_not_specialize=["first"])
def nearest_kernel(first, out, ELEMENT: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Codes (uint8) of the numbers with the bits ``first``, ``first + 1``, ..., rounded to the nearest."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, fp8_or_software_codes(float_of(first + at), ELEMENT, FP8))


@triton.jit(do_not_specialize=["first"])
def stochastic_kernel(first, random, out, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """The same, rounded stochastically with a random byte for each."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fraction = tl.load(random + at).to(tl.int32) << 15
    tl.store(out + at, stochastic_codes(float_of(first + at), fraction, ELEMENT).to(tl.uint8))


@triton.jit(do_not_specialize=["first"])
def fp4_kernel(first, out, BLOCK: tl.constexpr):
    """Codes of E2M1 by hardware, eight in an int32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = first + 8 * at
    word = hardware_fp4_codes(
        float_of(b), float_of(b + 1), float_of(b + 2), float_of(b + 3),
        float_of(b + 4), float_of(b + 5), float_of(b + 6), float_of(b + 7),
    )  # fmt: skip
    tl.store(out + at, word)


@triton.jit(do_not_specialize=["first"])
def bf16_kernel(first, out, COMPILED: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers rounded to bf16, as fp32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, rounded_to_bf16(float_of(first + at), COMPILED))
