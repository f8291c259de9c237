"""MXINT8 of the OCP microscaling specification: integers under a power-of-two scale.

A code is a two's complement integer over 64, from -127/64 to 127/64. The specification leaves it open whether
-128 (-2.0) is used. It is not written here, so that x and -x always have opposite codes; it is read as -2.

There is no code for infinity or NaN, which become the largest number; under the largest scale that is finite,
1.98 * 2**127, where the larger numbers of other MX formats overflow to infinity again.
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
