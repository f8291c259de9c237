"""Elements that are a table: any numbers at all, one for each code."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from .written import WrittenByFields

Ties = Literal["even", "away", "zero"]


@dataclass(frozen=True, eq=False)
class TableElement(WrittenByFields):
    """A number format given by the value of every code, in the order of the codes.

    ``table``          256, 64 or 16 numbers (rounded to float32, in which everything is computed); NaN and
                       infinities where codes stand for these
    ``ties``           what a number halfway between two neighbours becomes: the one with the "even" code, the
                       one "away" from zero, or the one next to "zero"
    ``infinite_from``  numbers of this magnitude or more become infinity; None: all saturate, infinities too
    ``unused``         codes that are read but never written

    Of several codes for one number, the lowest is written. A table may have a code for -0, or not.
    """

    name: str
    table: tuple[float, ...]
    ties: Ties = "even"
    infinite_from: float | None = None
    unused: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.table) not in (16, 64, 256):
            raise ValueError(f"element {self.name!r}: a table has 16, 64 or 256 numbers, not {len(self.table)}")
        if self.ties not in get_args(Ties):
            raise ValueError(f"element {self.name!r}: ties go to 'even', 'away' or 'zero', not {self.ties!r}")
        object.__setattr__(self, "table", tuple(self._as_float32(value) for value in self.table))
        object.__setattr__(self, "unused", tuple(self.unused))
        problem = self._problem()
        if problem:
            raise ValueError(f"element {self.name!r}: {problem}")

    def _as_float32(self, value: float) -> float:
        if math.isnan(value):
            return math.nan
        try:
            (rounded,) = struct.unpack("<f", struct.pack("<f", value))
        except OverflowError:
            raise ValueError(f"element {self.name!r}: {value} is beyond float32") from None
        return float(rounded)

    def _problem(self) -> str | None:
        for code in self.unused:
            if not 0 <= code < len(self.table):
                return f"there is no code {code} that could be unused"
        numbers = self.written_codes
        if not any(value > 0 for value in numbers):
            return "the table has no number above zero, so there is nothing that a scale could aim at"
        if self.infinite_from is not None:
            if not self.infinite_from > max(map(abs, numbers)):
                return f"numbers from {self.infinite_from} up cannot be infinite: the table has larger ones"
            signs = [math.copysign(1, value) for value in self.table if math.isinf(value)]
            if not {1.0, -1.0 if min(numbers) < 0 else 1.0} <= set(signs):
                return f"numbers from {self.infinite_from} up have no infinity in the table to become"
        ordered = sorted(numbers.items())
        for (low, low_code), (high, high_code) in pairwise(ordered):
            if self.ties == "even" and low_code % 2 == high_code % 2:
                return (
                    f"{low} and {high} are neighbours, and their codes {low_code} and {high_code} are both "
                    f"{'odd' if low_code % 2 else 'even'}, so ties cannot go to the even one; choose 'away' or 'zero'"
                )
        return None

    @cached_property
    def written_codes(self) -> dict[float, int]:
        """The finite numbers that are written, and the code of each: the lowest if there are several."""
        found: dict[float, int] = {}
        for code, value in enumerate(self.table):
            if math.isfinite(value) and code not in self.unused:
                found.setdefault(value, code)
        zero = self.code_of(0.0)
        if zero is not None:
            found[0.0] = zero  # 0 and -0 are one number here, and 0 comes first
        return found

    def code_of(self, value: float) -> int | None:
        """The lowest code that stands for exactly this, signs of zeros and NaN included; None if there is none."""
        wanted = struct.pack("<d", math.nan if math.isnan(value) else value)
        codes = (code for code, known in enumerate(self.table) if struct.pack("<d", known) == wanted)
        return next((code for code in codes if code not in self.unused), None)

    @property
    def bits(self) -> int:
        return len(self.table).bit_length() - 1

    @cached_property
    def max(self) -> float:
        """The largest magnitude that numbers of both signs may have, which is what scales aim at."""
        numbers = self.written_codes
        highest, lowest = max(numbers), min(numbers)
        return min(highest, -lowest) if lowest < 0 else highest

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest number: 0 for 1.98."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        numbers = self.written_codes
        return numbers[max(numbers)]

    @cached_property
    def nan_code(self) -> int:
        """What NaN is cast to: the first code that is NaN, or the largest number where there is none."""
        found = self.code_of(math.nan)
        return self.max_code if found is None else found

    def value(self, code: int) -> float:
        return self.table[code]

    def values(self) -> tuple[float, ...]:
        """The decode table: the value of every code in order."""
        return self.table

    def _key(self) -> tuple[object, ...]:
        """All that this is, with 0 apart from -0, which compare equal as numbers."""
        return self.name, struct.pack(f"<{len(self.table)}d", *self.table), self.ties, self.infinite_from, self.unused

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableElement):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.name)  # equal elements have equal names; formats are hashed all the time

    def __repr__(self) -> str:
        return f"TableElement({self.name!r}, {len(self.table)} numbers up to {self.max:g})"
