"""Casting fp32 numbers to the codes of an element that is a table.

The numbers of a table, in order, divide the line into stretches that round to the same one. Where two of them
meet is worked out once, exactly, tie rule included: as the last fp32 number of the lower stretch. Casting is then
a search among these limits.
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


class _Stretches(NamedTuple):
    """``values`` ascending, the ``codes`` that stand for them, and ``limits``: the last number of each but the last.

    ``zero`` is the place of zero among them, and the others are codes; None where the table has no such thing.
    """

    values: tuple[float, ...]
    codes: tuple[int, ...]
    limits: tuple[float, ...]
    zero: int | None
    negative_zero: int | None
    infinity: int | None
    negative_infinity: int | None


def round_to_nearest(v: Tensor, element: TableElement) -> Tensor:
    """Codes (uint8) of fp32 ``v``: nearest, with the element's ties and overflow."""
    table = _stretches(element)
    limits = torch.tensor(table.limits, dtype=torch.float32, device=v.device)
    place = torch.searchsorted(limits, torch.where(v.isnan(), 0.0, v))
    return _with_specials(_taken(table.codes, place), v, place, element)


def round_stochastically(v: Tensor, element: TableElement, random_bytes: Tensor) -> Tensor:
    """Codes (uint8) of fp32 ``v``: the neighbour away from zero with the probability of the place before it.

    As for other elements, r/256 of the distance between the neighbours is added to the magnitude, in fp32.
    """
    table = _stretches(element)
    values = torch.tensor(table.values, dtype=torch.float32, device=v.device)
    number = torch.where(v.isnan(), 0.0, v).clamp(table.values[0], table.values[-1])
    last = len(table.values) - 1
    above = torch.searchsorted(values, number).clamp(max=last)  # the first that is not less
    below = (torch.searchsorted(values, number, right=True) - 1).clamp(min=0)  # the last that is not more
    outwards, inwards = torch.where(number < 0, below, above), torch.where(number < 0, above, below)
    step = (values[above] - values[below]).abs()
    moved = number.abs() + (random_bytes.to(torch.float32) * (1.0 / 256.0)) * step
    # Between two numbers of different signs, moving away from zero ends at the one of the same sign.
    place = torch.where(moved >= values[outwards].abs(), outwards, inwards)
    return _with_specials(_taken(table.codes, place), v, place, element)


def _taken(codes: tuple[int, ...], place: Tensor) -> Tensor:
    return torch.tensor(codes, dtype=torch.int32, device=place.device)[place]


def _with_specials(codes: Tensor, v: Tensor, place: Tensor, element: TableElement) -> Tensor:
    """Zeros keep their sign and large numbers become infinite if the table has codes for that; NaN is NaN's code."""
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
        # A tie at zero itself, between -x and x, goes up.
        down = {
            "even": codes[place] % 2 == 0,
            "away": middle < 0,
            "zero": middle > 0,
        }[element.ties]
        if not down:
            nearest = np.nextafter(nearest, np.float32(-np.inf))
    return float(nearest)
