"""Formats and encodings for tests of kernels: all built-in ones, and some that a user might register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from crossgrain.formats import (
    E2M1,
    E3M2,
    E4M3,
    E5M2,
    Element,
    Format,
    ScaleLayout,
    TableElement,
    formats,
    get_format,
    mxfp8_format,
    nvfp4_format,
)
from crossgrain.formats.encoding import Encoding
from crossgrain.formats.mxint8 import INT8
from crossgrain.planes import Direction

from ...common.encodings import ENCODINGS as COMMON

_GEMM_TILE = ScaleLayout(pad=(128, 4))
_E1M2 = Element("e1m2", 1, 2, bias=1, max=1.75)
_E2M1_TO_4 = Element("e2m1_to_4", 2, 1, bias=1, max=4.0)  # the codes of E2M1, but it saturates earlier
_E3M4 = Element("e3m4", 3, 4, bias=3, max=31.0)
_E3M2_NAN = Element("e3m2_nan", 3, 2, bias=3, max=24.0, specials="nan")
_LARGE = Element("large", 4, 3, bias=-3, max=2.0**18 * 1.75)  # whose smallest normal number is 16
_RAMP = TableElement("ramp4", tuple(i - 7.5 for i in range(16)))


def _two_level(name: str, element: Element = E2M1, **options: object) -> Format:
    given = {"block": (1, 16), "layout": _GEMM_TILE, "global_amax": "tensor", **options}
    return Format(name, element, scale_rule="two_level", **given)  # type: ignore[arg-type]


WITH_KERNELS = {
    fmt.name: fmt
    for fmt in (
        Format("blocks_of_64", E4M3, (1, 64), "e8m0_up", _GEMM_TILE),
        Format("flat_blocks_of_128", E4M3, (1, 128), "e8m0_up", transposes=False, ragged=True),
        Format("blocks_of_8", E5M2, (1, 8), "e8m0_floor", _GEMM_TILE, transposes=False),
        Format("tiles_once", E4M3, (32, 32), "e8m0_up", transposes=False),
        Format("two_rows", E4M3, (2, 32), "e8m0_up", transposes=False),
        Format("flat_tiles", _E3M4, (64, 16), "fp32", ragged=True),
        Format("block_major", E4M3, (1, 32), "e8m0_up", ScaleLayout(transposed=True), transposes=False),
        Format("ragged_mx", E4M3, (1, 32), "e8m0_up", transposes=False, ragged=True),
        Format("amax_to_256", E4M3, (1, 128), layout=ScaleLayout(), ragged=True, amax_to=256.0),
        Format("fp4_fp32", E2M1, (1, 32), "fp32"),
        Format("fp6_nan", _E3M2_NAN, (1, 32), "e8m0_up", _GEMM_TILE),
        Format("fp6_pairs", E3M2, (1, 4), "e8m0_floor"),
        Format("e3m4", _E3M4, ragged=True),
        Format("int8", INT8, ragged=True),
        Format("int8_blocks", INT8, (1, 64), "fp32", ragged=True),
        _two_level("nv_e1m2", _E1M2),
        _two_level("nv_to_4", _E2M1_TO_4, scale_bound=300),
        _two_level("nv_e5m2_scales", scale_element=E5M2, scale_bound=1024),
        _two_level("nv_block_major", layout=ScaleLayout(transposed=True)),
        _two_level("nv_rotated_rows_scaled", rotation=0x1234, global_amax="row"),
    )
}
"""Formats of users for which kernels can be made."""

WITHOUT_KERNELS = {
    fmt.name: fmt
    for fmt in (
        get_format("hifloat8"),
        Format("blocks_of_48", E4M3, (1, 48), "e8m0_up", _GEMM_TILE),
        Format("blocks_of_256", E4M3, (1, 256), ragged=True),
        Format("large", _LARGE, ragged=True),
        Format("ramp", _RAMP, (1, 32), "e8m0_up", _GEMM_TILE),
        replace(mxfp8_format(), name="mx_rotated", rotation=3),
        _two_level("nv_32", block=(1, 32)),
        _two_level("nv_fp8", E4M3),
        _two_level("nv_once_2d", block=(16, 16), layout=ScaleLayout()),
    )
}
"""Formats for which there are none. The reference serves them."""


def _always(encoding: Encoding) -> Callable[[Direction], Encoding]:
    return lambda direction: encoding


def _stochastic() -> dict[str, Callable[[Direction], Encoding]]:
    return {
        f"{fmt.name}_sr": _always(Encoding(fmt, stochastic=True))
        for fmt in (*formats(), *WITH_KERNELS.values())
        if not fmt.is_identity and fmt.name not in WITHOUT_KERNELS
    }


ENCODINGS: dict[str, Callable[[Direction], Encoding]] = {
    **{name: encoding for name, encoding in COMMON.items() if name not in WITHOUT_KERNELS},
    **{name: _always(Encoding(fmt)) for name, fmt in WITH_KERNELS.items()},
    **_stochastic(),
    "nvfp4_rotated_rows": _always(Encoding(nvfp4_format(rotation=0xD7E8), stochastic=True)),
    "nvfp4_rotated_without_signs": _always(Encoding(nvfp4_format(rotation=0))),
    "nvfp4_rotated_otherwise": _always(Encoding(nvfp4_format(rotation=0x8001, scale_bound=256))),
    "nvfp4_ue5m3_4over6": _always(Encoding(get_format("nvfp4_ue5m3"), four_over_six="MSE")),
    "nv_e1m2_4over6": _always(Encoding(WITH_KERNELS["nv_e1m2"], four_over_six="MAE")),
    "fp8_eps": _always(Encoding(get_format("fp8"), epsilon=1e-2)),
    "fp8_block_pow2_eps": _always(Encoding(get_format("fp8_block"), epsilon=1e-2, power_of_two=True)),
    "fp8_block_2d_pow2": _always(Encoding(get_format("fp8_block_2d_e5m2"), power_of_two=True)),
    "int8_blocks_pow2": _always(Encoding(WITH_KERNELS["int8_blocks"], power_of_two=True)),
}
"""Encodings by name for which there are kernels. The encoding may depend on the direction."""

REFERENCE_ENCODINGS: dict[str, Callable[[Direction], Encoding]] = {
    **{name: _always(Encoding(fmt)) for name, fmt in WITHOUT_KERNELS.items()},
    "mxfp8_philox": _always(Encoding(mxfp8_format(), stochastic=True, random="philox")),
    "nvfp4_philox": _always(Encoding(nvfp4_format(), stochastic=True, random="philox")),
}
"""Encodings by name for which there are none."""

ALL = {**ENCODINGS, **REFERENCE_ENCODINGS}
