"""`Estimate`: a mean with its interval. All numbers that the lab shows are of this kind. And t-tests of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .student import t_cdf, t_quantile

LEVEL = 0.95  # of all intervals, unless another one is asked for
_MOST_DECIMALS = 7  # smaller numbers are written with an exponent


@dataclass(frozen=True)
class Estimate:
    """A mean, and an interval that contains the true mean with a probability of 95 %.

    Attributes:
        mean: the mean.
        low: lower end of the interval; -inf if one value says nothing about the spread.
        high: upper end of the interval; inf in the same case.
        count: number of values.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return (self.high - self.low) / 2

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals have a number in common, so that an order of the two is not shown."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return with_spread(self.mean, self.half_width)


def with_spread(mean: float, half_width: float, sign: str = "") -> str:
    """A mean, and half of its interval, as text, with as many decimals as two digits of the latter have.

    >>> with_spread(0.023, 0.00075)
    '0.02300 ± 0.00075'

    Args:
        mean: the mean.
        half_width: half of the interval; if it is infinite, the mean is shown alone.
        sign: "+" to show the sign of a positive mean, too.
    """
    if math.isinf(half_width):
        return f"{mean:{sign}.3g}"
    decimals = max(0, 1 - math.floor(math.log10(half_width))) if half_width > 0 else _MOST_DECIMALS + 1
    if decimals > _MOST_DECIMALS:
        return f"{mean:{sign}.3g} ± {half_width:.2g}"
    return f"{mean:{sign}.{decimals}f} ± {half_width:.{decimals}f}"


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """The mean of independent values, with the interval of Student's t distribution.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the mean of no values is not defined")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    half = t_quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def p_above(values: Sequence[float], bound: float = 0.0) -> float:
    """The p-value of the one-sided t-test that the true mean is at most ``bound``.

    A small one says that the mean is above the bound. It is 1 for one value, which says nothing about the spread. If
    all values are equal, it is 0 above the bound and 1 otherwise.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a test needs at least one value")
    if len(values) == 1:
        return 1.0
    distance, error = statistics.fmean(values) - bound, statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return t_cdf(-distance / error, len(values) - 1)


def p_below(values: Sequence[float], bound: float = 0.0) -> float:
    """The p-value of the one-sided t-test that the true mean is at least ``bound``: small if it is below."""
    return p_above([-value for value in values], -bound)


def p_different(values: Sequence[float], bound: float = 0.0) -> float:
    """The p-value of the two-sided t-test that the true mean is ``bound``."""
    return min(1.0, 2 * min(p_above(values, bound), p_below(values, bound)))
