"""Scales of whole tensors as Python numbers: a tensor operation would take too long for one division.

Dividing two fp32 numbers in double precision and rounding to fp32 gives the fp32 quotient, so the bits are the same as
in the reference (see ``reference.scaling``).
"""

from __future__ import annotations

import ctypes
import math
import struct

from ...formats.encoding import Encoding
from ..reference.elements import FP32_MAX


def fp32(value: float) -> float:
    """``value`` rounded to fp32."""
    return ctypes.c_float(value).value


def from_bits(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)


def quotient(number: float, divisor: float) -> float:
    if divisor == 0.0:
        return math.copysign(math.inf, divisor) if number else math.nan
    return fp32(number / divisor)


def tensor_factor(amax: float, encoding: Encoding) -> float:
    """The scale by which a per-tensor format multiplies."""
    epsilon = fp32(encoding.epsilon)
    amax = epsilon if amax < epsilon else amax
    if not 0.0 < amax < math.inf:  # NaN as well
        return 1.0
    factor = quotient(encoding.format.target, amax)
    if math.isinf(factor):
        factor = FP32_MAX
    return _power_of_two_below(factor) if encoding.power_of_two else factor


def _power_of_two_below(factor: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    return from_bits(bits & 0xFF800000)
