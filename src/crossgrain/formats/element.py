"""`Element`: what the bits of one number mean.

An element is defined by the sizes of its sign, exponent and mantissa. Rounding, encoding and decoding are computed from
these few integers. Numbers that do not consist of these three are a `TableElement`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .written import WrittenByFields


@dataclass(frozen=True)
class Element(WrittenByFields):
    """A floating point number of 4, 6 or 8 bits, such as E4M3: 4 bits of exponent, 3 bits of mantissa, bias 7.

    Args:
        name: name of the element.
        exponent_bits: number of bits of the exponent.
        mantissa_bits: number of bits of the mantissa.
        bias: bias of the exponent.
        max: largest finite number; 448 for E4M3.
        specials: which codes are not numbers. "none": all codes are numbers. "nan": the magnitude with all bits set is
            NaN. "ieee": the largest exponent is for infinity and NaN.
        signed: whether there is a sign bit.

    Raises:
        ValueError: ``specials`` is wrong, or codes do not have 4, 6 or 8 bits.

    Examples:
        >>> e4m3 = cg.formats.get_element("e4m3")
        >>> e4m3.exponent_bits, e4m3.mantissa_bits, e4m3.max
        (4, 3, 448.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    specials: Literal["none", "nan", "ieee"] = "none"
    signed: bool = True

    def __post_init__(self) -> None:
        if self.specials not in ("none", "nan", "ieee"):
            raise ValueError(f"element {self.name!r}: specials must be 'none', 'nan' or 'ieee', got {self.specials!r}")
        if self.bits not in (4, 6, 8):
            raise ValueError(f"element {self.name!r}: codes must have 4, 6 or 8 bits, got {self.bits}")

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def magnitude_mask(self) -> int:
        """All bits except the sign: 0x7F for E4M3, 0x7 for E2M1."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def sign_bit(self) -> int:
        """The sign bit; 0 if there is none."""
        return self.magnitude_mask + 1 if self.signed else 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number: -6 for E4M3."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number: 8 for E4M3 (448 = 1.75 * 2**8)."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        fraction = self.max / 2.0**self.max_exponent - 1.0
        exponent_field = self.max_exponent + self.bias
        return (exponent_field << self.mantissa_bits) + int(fraction * (1 << self.mantissa_bits))

    @property
    def nan_code(self) -> int:
        """The code to which NaN is cast: all bits of the magnitude set, or +max if the element has no NaN."""
        return self.max_code if self.specials == "none" else self.magnitude_mask

    def value(self, code: int) -> float:
        """The number of a code: ``E2M1.value(7) == 6.0``."""
        sign = -1.0 if code & self.sign_bit else 1.0
        magnitude = code & self.magnitude_mask
        fraction = magnitude & ((1 << self.mantissa_bits) - 1)
        exponent_field = magnitude >> self.mantissa_bits
        if self.specials == "nan" and magnitude == self.magnitude_mask:
            return math.nan
        if self.specials == "ieee" and exponent_field == (1 << self.exponent_bits) - 1:
            return math.nan if fraction else sign * math.inf
        if not self.mantissa_bits:  # a scale: no zero, no subnormals, every code is a power of two
            return math.ldexp(1.0, exponent_field - self.bias)
        if exponent_field == 0:
            return sign * math.ldexp(fraction, self.min_exponent - self.mantissa_bits)
        significand = fraction + (1 << self.mantissa_bits)
        return sign * math.ldexp(significand, exponent_field - self.bias - self.mantissa_bits)

    @lru_cache  # noqa: B019 - elements are a handful of module constants
    def values(self) -> tuple[float, ...]:
        """The numbers of all codes, in the order of the codes."""
        return tuple(self.value(code) for code in range(1 << self.bits))

    def __hash__(self) -> int:
        return hash(self.name)  # fast, because formats are hashed often; equal elements have equal names


E4M3 = Element("e4m3", 4, 3, bias=7, max=448.0, specials="nan")
E5M2 = Element("e5m2", 5, 2, bias=15, max=57344.0, specials="ieee")
E2M1 = Element("e2m1", 2, 1, bias=1, max=6.0)
E2M3 = Element("e2m3", 2, 3, bias=1, max=7.5)
E3M2 = Element("e3m2", 3, 2, bias=3, max=28.0)
UE5M3 = Element("ue5m3", 5, 3, bias=15, max=114688.0, specials="nan", signed=False)
E8M0 = Element("e8m0", 8, 0, bias=127, max=2.0**127, specials="nan", signed=False)
