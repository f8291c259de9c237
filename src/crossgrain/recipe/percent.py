"""Percentages in recipes: ``last 15 % of blocks``, ``last 10 % of steps``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

NUMBER = r"\d+(?:\.\d+)?"
"""The regular expression of the number before the percent sign."""


@dataclass(frozen=True)
class Percent:
    """A share of a whole, above 0 and up to 100. It is kept as it was written in decimals, so nothing is rounded twice.

    Raises:
        ValueError: the number is not in this range.
    """

    value: Decimal

    def __post_init__(self) -> None:
        if not 0 < self.value <= 100:
            raise ValueError(f"a percentage must be above 0 and at most 100, got {self}")

    @classmethod
    def parse(cls, text: str) -> Percent:
        """Read a number such as ``15`` or ``12.5``."""
        return cls(Decimal(text).normalize())

    def of(self, whole: int) -> int:
        """This share of ``whole``, rounded to the nearest number (a half is rounded up), but at least 1."""
        return max(1, math.floor(whole * self.fraction + Fraction(1, 2)))

    @property
    def fraction(self) -> Fraction:
        """The share as an exact number between 0 and 1."""
        return Fraction(self.value) / 100

    def __str__(self) -> str:
        return f"{self.value:f} %"
