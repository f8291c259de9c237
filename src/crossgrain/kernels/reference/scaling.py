"""Scale rules: compute the stored scale and the factor for encoding from the amax of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import AnyElement, Element, Format
from .elements import FP32_MAX, element_values, round_to_nearest


class Scales(NamedTuple):
    """The scales of blocks.

    Attributes:
        stored: what is stored in the plane.
        factor: the fp32 number by which the input is multiplied before it is rounded.
    """

    stored: Tensor
    factor: Tensor


def quotient(number: float, divisor: Tensor) -> Tensor:
    """``number / divisor``, rounded once. torch computes ``float / tensor`` with a rounded reciprocal."""
    return torch.full_like(divisor, number) / divisor


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """``numbers / divisor``, rounded once. On GPUs torch multiplies with the reciprocal of a Python number instead."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def fp32_scales(
    amax: Tensor,
    element: AnyElement,
    *,
    target: float | None = None,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    overflow: float = FP32_MAX,
) -> Scales:
    """One fp32 scale per amax. The factor is 1 if the amax is 0, infinite or NaN.

    Args:
        amax: the amaxes.
        element: the element.
        target: the number to which the amax is mapped; None for the largest number of the element.
        epsilon: smallest amax that is used.
        power_of_two: round factors down to powers of two.
        overflow: the factor to use instead of one that is beyond fp32.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    usable = (amax > 0) & amax.isfinite()
    factor = quotient(element.max if target is None else target, torch.where(usable, amax, 1.0))
    factor = torch.where(factor.isinf(), overflow, factor)
    if power_of_two:
        factor = (factor.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    factor = torch.where(usable, factor, 1.0)
    return Scales(quotient(1.0, factor), factor)


def e8m0_up_scales(amax: Tensor, element: AnyElement) -> Scales:
    """The smallest powers of two as scales with which the amax is not clipped."""
    stored = e8m0_round_up(amax * _fp32(1.0 / element.max))
    return Scales(stored, e8m0_reciprocal(stored))


def e8m0_floor_scales(amax: Tensor, element: AnyElement) -> Scales:
    """The OCP rule: the exponent of the amax, minus the largest exponent of the element."""
    exponent = amax.view(torch.int32) >> 23
    stored = (exponent - element.max_exponent).clamp(0, 254).to(torch.uint8)
    return Scales(stored, e8m0_reciprocal(stored))


def e8m0_round_up(v: Tensor) -> Tensor:
    """The E8M0 byte of the smallest power of two that is at least ``v`` (fp32, v >= 0). NaN gives 255, infinity 254."""
    bits = v.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    exact = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    byte = torch.where(exact, exponent, exponent + 1).clamp(max=254)
    return torch.where(v.isnan(), 255, byte).to(torch.uint8)


def e8m0_value(byte: Tensor) -> Tensor:
    """The fp32 number ``2**(byte - 127)`` of an E8M0 byte. 255 is NaN, and 0 is the subnormal 2**-127."""
    exponent = byte.to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """The exact reciprocal of an E8M0 byte in fp32, ``2**(127 - byte)``. 255 is NaN."""
    return torch.where(byte == 255, torch.nan, e8m0_value(254 - byte.clamp(max=254)))


class GlobalScale(NamedTuple):
    """The fp32 scale of a tensor (or of each row) in a two-level format: to encode, and to decode."""

    encode: Tensor
    decode: Tensor


def global_scale(amax: Tensor, fmt: Format) -> GlobalScale:
    """The global scale, which maps the amax to (largest block scale) * (largest number of the element)."""
    assert fmt.element is not None
    encode = quotient(fmt.element.max * fmt.scale_bound, amax).clamp(max=FP32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    return GlobalScale(encode, quotient(1.0, encode))


def two_level_scales(amax: Tensor, scale: GlobalScale, fmt: Format) -> Scales:
    """The scales of blocks, for a given global scale."""
    assert fmt.element is not None
    wanted = (amax * (scale.encode * _fp32(1.0 / fmt.element.max))).clamp(max=FP32_MAX)
    return block_scales(wanted, scale, fmt.scale_element)


def block_scales(wanted: Tensor, scale: GlobalScale, element: Element) -> Scales:
    """``wanted`` rounded to the element of scales, and the factor: the reciprocal of both scales."""
    stored = round_to_nearest(wanted, element)
    factor = quotient(1.0, element_values(stored, element) * scale.decode).clamp(max=FP32_MAX)
    return Scales(stored, factor)


def two_level_decode_factor(stored: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """The number by which the decoded elements of a block are multiplied, computed in the order of hardware."""
    assert fmt.element is not None
    return (element_values(stored, fmt.scale_element) * amax) * _fp32(1.0 / (fmt.element.max * fmt.scale_bound))


@lru_cache(maxsize=256)
def _fp32(number: float) -> float:
    """A number rounded to fp32, so that it is the same in whatever precision a device multiplies."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()
