"""The built-in formats."""

from __future__ import annotations

from .element import E2M1, E2M3, E3M2, E4M3, E5M2
from .format import IDENTITY, Format, fp8_block_format, fp8_format, mxfp8_format, nvfp4_format, ocp_mx_format
from .hifloat8 import HIFLOAT8
from .mxint8 import MXINT8
from .nvfp4_ue5m3 import NVFP4_UE5M3

BUILT_IN: tuple[Format, ...] = (
    fp8_format(E4M3),
    fp8_format(E5M2),
    fp8_block_format(E4M3),
    fp8_block_format(E5M2),
    fp8_block_format(E4M3, two_d=True),
    fp8_block_format(E5M2, two_d=True),
    mxfp8_format(E4M3),
    mxfp8_format(E5M2),
    mxfp8_format(E4M3, two_d=True),
    mxfp8_format(E5M2, two_d=True),
    nvfp4_format(),
    nvfp4_format(two_d=True),
    nvfp4_format(row_scaled=True),
    nvfp4_format(scale_bound=256),
    nvfp4_format(scale_bound=256, two_d=True),
    ocp_mx_format("mxfp4", E2M1),
    ocp_mx_format("mxfp6_e2m3", E2M3),
    ocp_mx_format("mxfp6_e3m2", E3M2),
    MXINT8,
    HIFLOAT8,
    NVFP4_UE5M3,
    IDENTITY,
)
