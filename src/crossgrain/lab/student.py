"""Student's t distribution, which intervals over a few seeds or batches need. In plain Python: no package is needed."""

from __future__ import annotations

import math
from functools import lru_cache

_STEPS = 200  # of the continued fraction; it converges in far fewer
_TINY = 1e-300
_PRECISION = 1e-15


def t_cdf(t: float, freedom: float) -> float:
    """The probability that a number of Student's t distribution is at most ``t``.

    Args:
        t: the number.
        freedom: degrees of freedom, above 0.
    """
    if math.isinf(t):
        return 0.0 if t < 0 else 1.0
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1.0 - tail if t > 0 else tail


@lru_cache(maxsize=1024)  # the same few are needed over and over
def t_quantile(probability: float, freedom: float) -> float:
    """The number that `t_cdf` maps to ``probability``.

    >>> round(t_quantile(0.975, 2), 3)
    4.303

    Args:
        probability: between 0 and 1, without both.
        freedom: degrees of freedom, above 0.

    Raises:
        ValueError: ``probability`` is not between 0 and 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability must be between 0 and 1, got {probability}")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on the other side
        return 1.0 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _STEPS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1 + numerator * d)
            c = _away_from_zero(1 + numerator / c)
            fraction *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return front * fraction / a


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
