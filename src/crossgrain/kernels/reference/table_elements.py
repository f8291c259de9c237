"""Cast fp32 numbers to the codes of an element that is a table.

All numbers between two limits are rounded to the same number of the table. The limits are computed once, exactly, with
the rule for ties: each is the largest fp32 number that is rounded to the lower number. Casting is a search in the
limits.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...formats import TableElement
from .constants import constant


class _Stretches(NamedTuple):
    """The numbers of a table in ascending order, and what casting needs.

    Attributes:
        values: the numbers.
        codes: their codes.
        limits: for all numbers but the last, the largest fp32 number that is rounded to it.
        zero: index of zero in ``values``; None if the table has no zero.
        negative_zero: code of -0; None if there is none.
        infinity: code of infinity; None if there is none.
        negative_infinity: code of -infinity; None if there is none.
    """

    values: tuple[float, ...]
    codes: tuple[int, ...]
    limits: tuple[float, ...]
    zero: int | None
    negative_zero: int | None
    infinity: int | None
    negative_infinity: int | None


def round_to_nearest(v: Tensor, element: TableElement) -> Tensor:
    """Codes (uint8) of fp32 numbers, rounded to the nearest, with the element's rules for ties and large numbers."""
    table = _stretches(element)
    limits = constant(table.limits, torch.float32, v.device)
    place = torch.searchsorted(limits, torch.where(v.isnan(), 0.0, v))
    return _with_specials(_taken(table.codes, place), v, place, element)


def round_stochastically(v: Tensor, element: TableElement, random_bytes: Tensor) -> Tensor:
    """Codes (uint8) of fp32 numbers, rounded stochastically: the nearer a neighbour is, the more probable it is.

    As for other elements, r/256 of the distance between the neighbours is added to the magnitude, in fp32.
    """
    table = _stretches(element)
    values = constant(table.values, torch.float32, v.device)
    number = torch.where(v.isnan(), 0.0, v).clamp(table.values[0], table.values[-1])
    last = len(table.values) - 1
    above = torch.searchsorted(values, number).clamp(max=last)  # the first that is not below
    below = (torch.searchsorted(values, number, right=True) - 1).clamp(min=0)  # the last that is not above
    outwards, inwards = torch.where(number < 0, below, above), torch.where(number < 0, above, below)
    step = (values[above] - values[below]).abs()
    moved = number.abs() + (random_bytes.to(torch.float32) * (1.0 / 256.0)) * step
    # If the neighbours have different signs, moving away from zero ends at the neighbour of the same sign.
    place = torch.where(moved >= values[outwards].abs(), outwards, inwards)
    return _with_specials(_taken(table.codes, place), v, place, element)


def _taken(codes: tuple[int, ...], place: Tensor) -> Tensor:
    return constant(codes, torch.int32, place.device)[place]


def _with_specials(codes: Tensor, v: Tensor, place: Tensor, element: TableElement) -> Tensor:
    """Use the codes of -0, infinities and NaN, if the table has them."""
    table, negative = _stretches(element), v.signbit()
    if table.zero is not None and table.negative_zero is not None:
        codes = torch.where((place == table.zero) & negative, table.negative_zero, codes)
    if element.infinite_from is not None:
        beyond = v.abs() >= element.infinite_from
        if table.infinity is not None:
            codes = torch.where(beyond & ~negative, table.infinity, codes)
        if table.negative_infinity is not None:
            codes = torch.where(beyond & negative, table.negative_infinity, codes)
    return torch.where(v.isnan(), element.nan_code, codes).to(torch.uint8)


@lru_cache(maxsize=64)
def _stretches(element: TableElement) -> _Stretches:
    values, codes = zip(*sorted(element.written_codes.items()), strict=True)
    return _Stretches(
        values,
        codes,
        tuple(_limit(element, values, codes, place) for place in range(len(values) - 1)),
        values.index(0.0) if 0.0 in values else None,
        *map(element.code_of, (-0.0, math.inf, -math.inf)),
    )


def _limit(element: TableElement, values: tuple[float, ...], codes: tuple[int, ...], place: int) -> float:
    """The largest fp32 number that rounds to ``values[place]``."""
    low, high = values[place], values[place + 1]
    middle = (Fraction(low) + Fraction(high)) / 2
    nearest = np.float32(float(middle))
    if Fraction(float(nearest)) > middle:
        nearest = np.nextafter(nearest, np.float32(-np.inf))
    if Fraction(float(nearest)) == middle:
        # A tie at zero, between -x and x, is rounded up.
        down = {
            "even": codes[place] % 2 == 0,
            "away": middle < 0,
            "zero": middle > 0,
        }[element.ties]
        if not down:
            nearest = np.nextafter(nearest, np.float32(-np.inf))
    return float(nearest)
