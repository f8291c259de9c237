"""The scales of a plane: the number that each block is multiplied by, and statistics of them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...formats import AnyElement, Format, TableElement
from ...formats.encoding import Encoding
from ...kernels.reference.decode import decode_factors
from ...kernels.reference.elements import element_values
from ...kernels.reference.scaling import e8m0_value
from ...planes import Plane
from .passes import array_of, count_exponents

_TOLERANCE = 1 + 2.0**-20  # of scales and amaxes that were rounded in fp32


class ScaleStatistics(NamedTuple):
    """Statistics of the scales of blocks that are not all zero; see `PlaneStatistics`."""

    lowest: int | None
    highest: int | None
    histogram: dict[int, int]
    zero: float


def block_factors(plane: Plane) -> Tensor:
    """The numbers by which codes are multiplied, one for each block; [1, 1] if there is one for the whole tensor."""
    fmt = plane.format
    factors = _factors(plane)
    return factors[:: fmt.block_rows] if fmt.layout.replicated and fmt.block_rows > 1 else factors


def _factors(plane: Plane) -> Tensor:
    """`decode_factors`; on the CPU by looking bytes up, which is faster."""
    fmt, stored = plane.format, plane.operand_scales()
    if stored.device.type != "cpu" or fmt.scale_rule == "fp32":
        return decode_factors(plane)
    found = torch.from_numpy(_values_of_bytes(fmt)[array_of(stored)])
    if fmt.scale_rule != "two_level":
        return found
    assert fmt.element is not None and plane.amax is not None
    return found.mul_(plane.amax.view(-1, 1)).mul_(1.0 / (fmt.element.max * fmt.scale_bound))


@lru_cache(maxsize=64)
def _values_of_bytes(fmt: Format) -> np.ndarray:
    every = torch.arange(256, dtype=torch.uint8)
    values = element_values(every, fmt.scale_element) if fmt.scale_rule == "two_level" else e8m0_value(every)
    return values.numpy()


@lru_cache(maxsize=64)
def largest_rounded(element: AnyElement, stochastic: bool) -> float:
    """The largest number, in units of the scale, that is rounded as any other; what is beyond it is cut off.

    Numbers up to half a step beyond the largest are nearest to it. Stochastic rounding would take them further up with
    some probability, so everything beyond the largest is cut off.
    """
    if isinstance(element, TableElement) and element.infinite_from is not None:
        return element.infinite_from  # larger numbers become infinite
    if stochastic:
        return element.max
    values = sorted({value for value in element.values() if math.isfinite(value)})
    return element.max + (values[-1] - values[-2]) / 2


def limit_of(encoding: Encoding) -> float:
    """The largest magnitude that is not cut off, in units of the scale; infinity in high precision."""
    element = encoding.format.element
    return math.inf if element is None else largest_rounded(element, encoding.stochastic) * _TOLERANCE


def scale_statistics(factors: Tensor, power: Tensor | None) -> ScaleStatistics:
    """Compute the statistics of scales.

    Args:
        factors: the scales.
        power: zero for each block that is all zero, and does not count; None for a scale of the whole tensor.
    """
    power = torch.ones_like(factors, dtype=torch.float64) if power is None else power
    histogram, there, zero = count_exponents(factors, power)
    share = zero / max(1, there)
    return ScaleStatistics(min(histogram, default=None), max(histogram, default=None), histogram, share)
