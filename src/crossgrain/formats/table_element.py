"""`TableElement`: an element that is a table with any number for each code."""

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
    """An element that is defined by the number of every code.

    If several codes have the same number, the lowest code is written. The table may have a code for -0, but does not
    need one.

    Args:
        name: name of the element.
        table: 16, 64 or 256 numbers, in the order of the codes. NaN and infinities are allowed. Numbers are rounded to
            float32, in which everything is computed.
        ties: what a number halfway between two numbers of the table is rounded to: the one with the "even" code, the
            one "away" from zero, or the one nearer to "zero".
        infinite_from: numbers of at least this magnitude become infinity. None: all numbers, also infinities, become
            the largest number at most.
        unused: codes that are read but never written.

    Raises:
        ValueError: the table has another size, or the arguments do not fit together.

    Examples:
        >>> ramp = cg.formats.TableElement("ramp4", tuple(i - 7.5 for i in range(16)))  # -7.5, -6.5, ... 7.5
        >>> mx_ramp4 = cg.Format("mx_ramp4", ramp, (1, 32), "e8m0_up", cg.formats.ScaleLayout(pad=(128, 4)))
        >>> cg.quantize(torch.full((32, 32), 7.4), mx_ramp4).dequantize()[0, 0]
        tensor(7.5000)
    """

    name: str
    table: tuple[float, ...]
    ties: Ties = "even"
    infinite_from: float | None = None
    unused: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.table) not in (16, 64, 256):
            raise ValueError(f"element {self.name!r}: a table must have 16, 64 or 256 numbers, got {len(self.table)}")
        if self.ties not in get_args(Ties):
            raise ValueError(f"element {self.name!r}: ties must be 'even', 'away' or 'zero', got {self.ties!r}")
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
            raise ValueError(f"element {self.name!r}: {value} is outside of the range of float32") from None
        return float(rounded)

    def _problem(self) -> str | None:
        for code in self.unused:
            if not 0 <= code < len(self.table):
                return f"unused codes must be between 0 and {len(self.table) - 1}, got {code}"
        numbers = self.written_codes
        if not any(value > 0 for value in numbers):
            return "the table must have a number above zero, to which a scale can map the amax"
        if self.infinite_from is not None:
            if not self.infinite_from > max(map(abs, numbers)):
                return (
                    f"infinite_from must be larger than all numbers of the table, got {self.infinite_from}, but the "
                    f"table has {max(map(abs, numbers))}"
                )
            signs = [math.copysign(1, value) for value in self.table if math.isinf(value)]
            if not {1.0, -1.0 if min(numbers) < 0 else 1.0} <= set(signs):
                return f"infinite_from={self.infinite_from} needs infinities in the table, of every sign that it has"
        ordered = sorted(numbers.items())
        for (low, low_code), (high, high_code) in pairwise(ordered):
            if self.ties == "even" and low_code % 2 == high_code % 2:
                return (
                    f"ties='even' is not possible: {low} and {high} are next to each other, and their codes "
                    f"{low_code} and {high_code} are both {'odd' if low_code % 2 else 'even'}. Choose 'away' or 'zero'"
                )
        return None

    @cached_property
    def written_codes(self) -> dict[float, int]:
        """The finite numbers that are written, and the code of each: the lowest code if there are several."""
        found: dict[float, int] = {}
        for code, value in enumerate(self.table):
            if math.isfinite(value) and code not in self.unused:
                found.setdefault(value, code)
        zero = self.code_of(0.0)
        if zero is not None:
            found[0.0] = zero  # 0 and -0 are the same key; the code of 0 is used
        return found

    def code_of(self, value: float) -> int | None:
        """The lowest code of exactly this value, which may be NaN; 0 and -0 are different. None if there is none."""
        wanted = struct.pack("<d", math.nan if math.isnan(value) else value)
        codes = (code for code, known in enumerate(self.table) if struct.pack("<d", known) == wanted)
        return next((code for code in codes if code not in self.unused), None)

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return len(self.table).bit_length() - 1

    @cached_property
    def max(self) -> float:
        """The largest magnitude that numbers of both signs can have. Scales map the amax to it."""
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
        """The code to which NaN is cast: the first code of NaN, or that of the largest number if there is none."""
        found = self.code_of(math.nan)
        return self.max_code if found is None else found

    def value(self, code: int) -> float:
        """The number of a code."""
        return self.table[code]

    def values(self) -> tuple[float, ...]:
        """The numbers of all codes, in the order of the codes."""
        return self.table

    def _key(self) -> tuple[object, ...]:
        """All fields for a comparison in which 0 and -0 are different."""
        return self.name, struct.pack(f"<{len(self.table)}d", *self.table), self.ties, self.infinite_from, self.unused

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableElement):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.name)  # fast, because formats are hashed often; equal elements have equal names

    def __repr__(self) -> str:
        return f"TableElement({self.name!r}, {len(self.table)} numbers up to {self.max:g})"
