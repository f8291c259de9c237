"""NVFP4 with unsigned E5M3 block scales, as has been proposed for formats like it.

Scales are never negative, so the sign bit of E4M3 can be a bit of the exponent. UE5M3 has the same three bits of
mantissa, numbers from 2**-17 to 114688, and 0xFF for NaN. A block that is very small beside the largest number of its
tensor keeps its precision: E4M3 scales lose theirs below 2**-6 and are zero below 2**-10.

Everything else is as in NVFP4, also the bound 448 of block scales. So scales from 2**-6 on are the same numbers as in
NVFP4, and amaxes may be as large.
"""

from __future__ import annotations

from .element import E2M1, UE5M3
from .format import Format, ScaleLayout

NVFP4_UE5M3 = Format(
    "nvfp4_ue5m3",
    E2M1,
    (1, 16),
    "two_level",
    ScaleLayout(pad=(128, 4)),
    global_amax="tensor",
    scale_element=UE5M3,
)
