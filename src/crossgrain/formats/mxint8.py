"""MXINT8 of the OCP microscaling specification: 8-bit integers with a power-of-two scale for every 32 numbers.

A code is a two's complement integer divided by 64, from -127/64 to 127/64. The specification does not say whether -128
(-2.0) is used. Here it is never written, so that x and -x always have opposite codes; it is read as -2.

There is no code for infinity or NaN: they become the largest number. With the largest scale that is 1.98 * 2**127, a
finite number; in other MX formats, whose elements are larger, it overflows to infinity again.
"""

from __future__ import annotations

from .format import Format, ScaleLayout
from .table_element import TableElement

INT8 = TableElement(
    "int8",
    tuple((code - 256 if code > 127 else code) / 64 for code in range(256)),
    unused=(128,),
)

MXINT8 = Format("mxint8", INT8, (1, 32), "e8m0_floor", ScaleLayout(pad=(128, 4)), transposes=False)
