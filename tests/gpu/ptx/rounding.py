"""Exact sums and products, rounded once, to any small floating-point format."""

from dataclasses import dataclass

import numpy as np

from .values import Array


@dataclass(frozen=True)
class Layout:
    """A binary floating-point format with a sign; ``mantissa`` bits are stored, exponents begin at ``smallest``."""

    bits: int
    mantissa: int
    smallest: int  # the exponent of the smallest normal number
    largest: int  # the code of the largest finite number
    infinity: int | None  # its code; without one the format saturates
    nan: int  # what becomes of a NaN: the canonical one, or the largest number where there is none


F16 = Layout(16, 10, -14, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = Layout(16, 7, -126, 0x7F7F, 0x7F80, 0x7FFF)
E4M3 = Layout(8, 3, -6, 0x7E, None, 0x7F)
E5M2 = Layout(8, 2, -14, 0x7B, 0x7C, 0x7F)
E2M3 = Layout(6, 3, 0, 0x1F, None, 0x1F)
E3M2 = Layout(6, 2, -2, 0x1F, None, 0x1F)
E2M1 = Layout(4, 1, 0, 0x7, None, 0x7)


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: another rounding, to at most 51 bits, then gives what one alone would have.

    The error of a float64 sum is a float64 number itself. Where it is not zero, the sum is taken towards zero and its
    last bit is set, which tells every later rounding that there was something below.
    """
    total = a + b
    second = total - a
    error = (a - (total - second)) + (b - second)
    inexact = np.isfinite(total) & (error != 0)
    if not inexact.any():
        return total
    raw = total.view(np.int64)
    beyond = (error < 0) != (total < 0)  # the sum was rounded away from zero
    odd: Array = np.where(inexact, (raw - beyond) | 1, raw).view(np.float64)
    return odd


def encode(value: Array, layout: Layout, *, saturate: bool = False, towards_zero: bool = False) -> Array:
    """The codes of float64 numbers, to nearest even or towards zero, as uint16."""
    size = np.abs(value)
    finite = np.where(np.isfinite(size), size, 0)
    exponent = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 1, layout.smallest), layout.smallest)
    steps = np.ldexp(finite, layout.mantissa - exponent)
    steps = np.trunc(steps) if towards_zero else np.rint(steps)
    code = steps.astype(np.int64) + ((exponent.astype(np.int64) - layout.smallest) << layout.mantissa)
    top = layout.largest if saturate or layout.infinity is None else layout.infinity
    code = np.minimum(code, layout.largest if towards_zero else top)
    code = np.where(np.isinf(size), top, code) | np.signbit(value).astype(np.int64) << (layout.bits - 1)
    return np.where(np.isnan(size), layout.nan, code).astype(np.uint16)


def decode(code: Array, layout: Layout) -> Array:
    """Numbers of codes, in float64; exact."""
    size = (code & code.dtype.type((1 << (layout.bits - 1)) - 1)).astype(np.int64)
    field = size >> layout.mantissa
    steps = (size & ((1 << layout.mantissa) - 1)) + np.where(field > 0, 1 << layout.mantissa, 0)
    value = np.ldexp(steps.astype(np.float64), np.maximum(field, 1) - 1 + layout.smallest - layout.mantissa)
    if layout.infinity is not None:
        value = np.where(size == layout.infinity, np.inf, value)
    if layout.nan > layout.largest:
        value = np.where(size > (layout.infinity or layout.largest), np.nan, value)
    return np.asarray(np.where(code >> code.dtype.type(layout.bits - 1) & 1, -value, value))
