"""HiFloat8 ("Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626): more precision around 1, and a wide range.

After the sign, a prefix of variable length says how many bits the exponent has; the rest is the mantissa. The exponent
consists of a sign and a magnitude whose leading 1 is not stored, so no number has two codes:

    11 seee m      2**±(8..15)        10 see mm     2**±(4..7)       01 se mmm    2**±(2..3)
    001 s mmm      2**±1              0001 mmm      2**0             0000 mmm     2**(mmm - 23), without a mantissa

00000000 is the only zero, 10000000 is NaN, and the largest magnitude of each sign is infinity.

The format of tensors maps the amax to 15, the largest number with three bits of mantissa, as Ascend's dynamic
quantization does. It does not map it to the largest number, 2**15, because numbers around it have only one bit.
"""

from __future__ import annotations

import math

from .format import Format
from .table_element import TableElement

# Bits after the sign: prefix, its length, number of stored bits of the exponent's magnitude, bits of the mantissa.
_FIELDS = ((0b11, 2, 3, 1), (0b10, 2, 2, 2), (0b01, 2, 1, 3), (0b001, 3, 0, 3))


def _magnitude(code: int) -> float:
    """The number of the seven bits after the sign."""
    if code == 0:
        return 0.0
    for prefix, length, stored, mantissa_bits in _FIELDS:
        if code >> (7 - length) == prefix:
            mantissa = code & ((1 << mantissa_bits) - 1)
            exponent = 1 << stored | code >> mantissa_bits & ((1 << stored) - 1)
            sign = -1 if code >> (stored + mantissa_bits) & 1 else 1
            return math.ldexp(1 + mantissa / (1 << mantissa_bits), sign * exponent)
    return 1 + (code & 7) / 8 if code & 8 else math.ldexp(1.0, code - 23)


def _value(code: int) -> float:
    if code == 0x80:
        return math.nan
    magnitude = math.inf if code & 0x7F == 0x6F else _magnitude(code & 0x7F)
    return -magnitude if code & 0x80 else magnitude


HIF8 = TableElement(
    "hifloat8",
    tuple(map(_value, range(256))),
    ties="away",
    infinite_from=1.25 * 2.0**15,  # halfway between the largest number, 2**15, and 1.5 * 2**15, the code of infinity
)

HIFLOAT8 = Format("hifloat8", HIF8, ragged=True, amax_to=15.0)
