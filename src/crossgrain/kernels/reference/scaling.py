"""Scale rules: from the largest magnitude of a block to its stored scale and its encode factor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import E4M3, AnyElement, Format
from .elements import FP32_MAX, element_values, round_to_nearest


class Scales(NamedTuple):
    """``stored`` is what the plane keeps; ``factor`` multiplies the input before the cast (fp32)."""

    stored: Tensor
    factor: Tensor


def quotient(number: float, divisor: Tensor) -> Tensor:
    """``number / divisor`` with one rounding; torch's own ``float / tensor`` multiplies by a reciprocal."""
    return torch.full_like(divisor, number) / divisor


def fp32_scales(
    amax: Tensor,
    element: AnyElement,
    *,
    target: float | None = None,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    overflow: float = FP32_MAX,
) -> Scales:
    """One fp32 scale per amax: the factor takes amax to ``target``, by default the element's maximum.

    An amax of 0, Inf or NaN has factor 1. ``overflow`` replaces a quotient beyond fp32.
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
    """The smallest power of two that fits amax under the element's maximum."""
    reciprocal = torch.tensor(1.0 / element.max, dtype=torch.float32, device=amax.device)
    stored = e8m0_round_up(amax * reciprocal)
    return Scales(stored, e8m0_reciprocal(stored))


def e8m0_floor_scales(amax: Tensor, element: AnyElement) -> Scales:
    """The OCP rule: the power of two at or below amax goes to the element's top binade."""
    exponent = amax.view(torch.int32) >> 23
    stored = (exponent - element.max_exponent).clamp(0, 254).to(torch.uint8)
    return Scales(stored, e8m0_reciprocal(stored))


def e8m0_round_up(v: Tensor) -> Tensor:
    """E8M0 byte of the smallest power of two >= ``v`` (fp32, v >= 0); NaN -> 255, Inf -> 254."""
    bits = v.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    exact = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    byte = torch.where(exact, exponent, exponent + 1).clamp(max=254)
    return torch.where(v.isnan(), 255, byte).to(torch.uint8)


def e8m0_value(byte: Tensor) -> Tensor:
    """fp32 ``2**(byte - 127)``; 255 is NaN. Byte 0 is the subnormal 2**-127."""
    exponent = byte.to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """fp32 ``2**(127 - byte)``, exact; 255 is NaN."""
    return torch.where(byte == 255, torch.nan, e8m0_value(254 - byte.clamp(max=254)))


class GlobalScale(NamedTuple):
    """The tensor-wide (or row-wide) half of a two-level scale, fp32."""

    encode: Tensor
    decode: Tensor


def global_scale(amax: Tensor, fmt: Format) -> GlobalScale:
    """Takes amax to (largest block scale) * (largest code)."""
    assert fmt.element is not None
    encode = quotient(fmt.element.max * fmt.scale_bound, amax).clamp(max=FP32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    return GlobalScale(encode, quotient(1.0, encode))


def two_level_scales(amax: Tensor, scale: GlobalScale, element: AnyElement) -> Scales:
    """An E4M3 scale per block under the global scale."""
    sixth = torch.tensor(1.0 / element.max, dtype=torch.float32, device=amax.device)
    wanted = (amax * (scale.encode * sixth)).clamp(max=FP32_MAX)
    return e4m3_block_scales(wanted, scale)


def e4m3_block_scales(wanted: Tensor, scale: GlobalScale) -> Scales:
    """``wanted`` rounded to E4M3, and the factor that undoes it and the global scale."""
    stored = round_to_nearest(wanted, E4M3)
    factor = quotient(1.0, element_values(stored, E4M3) * scale.decode).clamp(max=FP32_MAX)
    return Scales(stored, factor)


def two_level_decode_factor(stored: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """What the code values of a block are multiplied by, in the order the hardware does it."""
    assert fmt.element is not None
    constant = torch.tensor(1.0 / (fmt.element.max * fmt.scale_bound), dtype=torch.float32, device=stored.device)
    return (element_values(stored, E4M3) * amax) * constant
