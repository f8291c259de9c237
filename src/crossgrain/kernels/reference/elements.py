"""Casting fp32 numbers to element codes and back.

Rounding works on the grid that a magnitude falls on: with m mantissa bits and exponent e, neighbours
are ``2**(e - m)`` apart. Counting grid steps gives the code directly, because the codes of all
magnitudes are consecutive integers: rounding up past the end of a binade simply lands in the next.
Elements that are a table have neither binades nor consecutive codes: see `table_elements`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import AnyElement, Element, TableElement
from . import table_elements

FP32_MAX = torch.finfo(torch.float32).max


def round_to_nearest(v: Tensor, element: AnyElement) -> Tensor:
    """Codes (uint8) of fp32 ``v``: nearest, ties to even, beyond the maximum saturates (tables: as they say)."""
    if isinstance(element, TableElement):
        return table_elements.round_to_nearest(v, element)
    magnitude = _saturated_magnitude(v, element)
    step_exponent = _step_exponent(magnitude, element)
    steps = torch.round(magnitude * _power_of_two(-step_exponent))  # torch.round is half to even
    return _codes(v, steps, step_exponent, element)


def round_stochastically(v: Tensor, element: AnyElement, random_bytes: Tensor) -> Tensor:
    """Codes (uint8) of fp32 ``v``, rounded up with the probability of its place between neighbours.

    ``random_bytes`` are 8 random bits per element: a number r/256 of a grid step is added to the
    magnitude, and the sum is rounded down on the grid it lands on.
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
    """The fp32 values of ``codes`` (uint8)."""
    table = torch.tensor(element.values(), dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int32)]


def _saturated_magnitude(v: Tensor, element: Element) -> Tensor:
    return torch.where(v.isnan(), 0.0, v.abs()).clamp(max=element.max)


def _step_exponent(magnitude: Tensor, element: Element) -> Tensor:
    """Exponent of the distance between neighbours at ``magnitude`` (int32)."""
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    return exponent.clamp(min=element.min_exponent) - element.mantissa_bits


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _codes(v: Tensor, steps: Tensor, step_exponent: Tensor, element: Element) -> Tensor:
    binade = step_exponent + element.mantissa_bits - element.min_exponent  # 0: subnormal or first normal
    magnitude_code = (binade << element.mantissa_bits) + steps.to(torch.int32)
    codes = torch.where(v.signbit(), magnitude_code | element.sign_bit, magnitude_code)
    return torch.where(v.isnan(), element.nan_code, codes).to(torch.uint8)
