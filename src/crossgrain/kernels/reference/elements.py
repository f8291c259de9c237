"""Cast fp32 numbers to codes of elements, and back.

With m bits of mantissa, the distance between numbers of exponent e is ``2**(e - m)``. Counting these steps gives the
code, because the codes of all magnitudes are consecutive integers: rounding up past the largest number of an exponent
gives the first number of the next one. For elements that are tables see `table_elements`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import AnyElement, Element, TableElement
from . import table_elements
from .constants import constant

FP32_MAX = torch.finfo(torch.float32).max


def round_to_nearest(v: Tensor, element: AnyElement) -> Tensor:
    """Codes (uint8) of fp32 numbers, rounded to the nearest. Ties go to the even code, and larger numbers saturate.

    Tables have their own rules for ties and large numbers.
    """
    if isinstance(element, TableElement):
        return table_elements.round_to_nearest(v, element)
    magnitude = _saturated_magnitude(v, element)
    step_exponent = _step_exponent(magnitude, element)
    steps = torch.round(magnitude * _power_of_two(-step_exponent))  # torch.round is half to even
    return _codes(v, steps, step_exponent, element)


def round_stochastically(v: Tensor, element: AnyElement, random_bytes: Tensor) -> Tensor:
    """Codes (uint8) of fp32 numbers, rounded stochastically: the nearer a neighbour is, the more probable it is.

    Args:
        v: the numbers.
        element: the element.
        random_bytes: 8 random bits for each number. The fraction r/256 of the distance between neighbours is added to
            the magnitude, and the sum is rounded down.
    """
    if isinstance(element, TableElement):
        return table_elements.round_stochastically(v, element, random_bytes)
    magnitude = _saturated_magnitude(v, element)
    step = _power_of_two(_step_exponent(magnitude, element))
    moved = magnitude + (random_bytes.to(torch.float32) * (1.0 / 256.0)) * step
    moved = moved.clamp(max=element.max)
    step_exponent = _step_exponent(moved, element)
    steps = torch.floor(moved * _power_of_two(-step_exponent))
    return _codes(v, steps, step_exponent, element)


def element_values(codes: Tensor, element: AnyElement) -> Tensor:
    """The fp32 numbers of codes (uint8)."""
    return constant(element.values(), torch.float32, codes.device)[codes.to(torch.int32)]


def _saturated_magnitude(v: Tensor, element: Element) -> Tensor:
    return torch.where(v.isnan(), 0.0, v.abs()).clamp(max=element.max)


def _step_exponent(magnitude: Tensor, element: Element) -> Tensor:
    """The exponent of the distance between neighbours at ``magnitude`` (int32)."""
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    return exponent.clamp(min=element.min_exponent) - element.mantissa_bits


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _codes(v: Tensor, steps: Tensor, step_exponent: Tensor, element: Element) -> Tensor:
    binade = step_exponent + element.mantissa_bits - element.min_exponent  # 0: subnormal or first normal
    magnitude_code = (binade << element.mantissa_bits) + steps.to(torch.int32)
    codes = torch.where(v.signbit(), magnitude_code | element.sign_bit, magnitude_code)
    return torch.where(v.isnan(), element.nan_code, codes).to(torch.uint8)
