"""What kernels are tried on: encodings, pairs of them, shapes, numbers, layouts of the input and of the planes.

A case is data; `agreement` writes its planes with two backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Within
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, shape_problem

from .formats import ALL, ENCODINGS, REFERENCE_ENCODINGS

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A matrix, and planes that one call writes from it.

    Attributes:
        rows: encodings of rowwise planes, or their names, see `formats`.
        columns: those of columnwise planes.
        shape: shape of the tensor; tiles of kernels end beyond both edges of the default.
        dtype: its dtype.
        numbers: see `matrices.NUMBERS`.
        layout: how it lies in memory, see `matrices.LAYOUTS`.
        offset: bytes before each buffer of a plane in the memory that it is a part of.
        scale: a given scale, for formats with one scale.
        amax: an amax to use instead of the measured one.
        within: where the matrix lies in a larger one.
        seed: seed of stochastic rounding.
        blocked_columns: columns of the planes that are not stored transposed lie in memory one after the other.
    """

    rows: tuple[str | Encoding, ...] = ()
    columns: tuple[str | Encoding, ...] = ()
    shape: tuple[int, ...] = (160, 32)
    dtype: torch.dtype = _BF16
    numbers: str = "mixed"
    layout: str = "contiguous"
    offset: int = 64
    scale: float | None = None
    amax: float | None = None
    within: Within | None = None
    seed: int = 0x1234_5678_9ABC_DEF0
    blocked_columns: bool = False

    def encodings(self) -> list[tuple[Direction, Encoding]]:
        """The planes to write, as far as the shape allows them."""
        wanted = [(ROWWISE, each) for each in self.rows] + [(COLUMNWISE, each) for each in self.columns]
        made = [(way, ALL[each](way) if isinstance(each, str) else each) for way, each in wanted]
        return [(way, each) for way, each in made if shape_problem(each.format, way, self.shape) is None]


def both(name: str, **options: object) -> Case:
    """A case with planes of one encoding in both directions."""
    return Case((name,), (name,), **options)  # type: ignore[arg-type]


def _by_encoding() -> dict[str, Case]:
    cases = {name: both(name) for name in ENCODINGS}
    for name in ("blocks_of_64", "blocks_of_64_sr"):
        cases[name] = both(name, shape=(192, 64))
    cases["fp8_delayed"] = both("fp8_delayed", scale=4.0)
    return cases


def _of_numbers() -> dict[str, Case]:
    names = ("infinite", "ties", "patterns", "zeros", "nans", "subnormal", "small", "huge", "spread")
    of = (
        "mxfp8", "mxfp8_2d_e5m2", "fp8", "fp8_block", "fp8_block_fp32_scales", "fp8_block_2d_pow2", "mxfp4",
        "mxfp6_e3m2", "mxint8", "mxint8_sr", "mxfp8_e5m2_sr", "nvfp4", "nvfp4_rht_sr", "nvfp4_2d",
        "nvfp4_row_scaled", "nvfp4_ue5m3", "nvfp4_4over6_448", "nvfp4_2d_4over6_mse", "int8_blocks",
    )  # fmt: skip
    return {
        f"{name} of {numbers} numbers": both(name, numbers=numbers, dtype=_FP32, shape=(128, 96))
        for name in of
        for numbers in names
    }


def _of_dtypes() -> dict[str, Case]:
    of = (
        "fp8_block", "fp8_block_2d", "fp8_block_fp32_scales", "fp8_pow2_eps", "flat_tiles", "mxfp8", "nvfp4_rht_sr",
        "nvfp4_4over6_mse", "mxfp4_sr",
    )  # fmt: skip
    half = {
        f"{name} of fp16, {numbers}": both(name, dtype=_FP16, numbers=numbers)
        for name in of
        for numbers in ("mixed", "small", "huge")
    }
    full = {f"{name} of fp32": both(name, dtype=_FP32) for name in of}
    small = {f"{name} of bf16, small": both(name, numbers="small") for name in of}
    double = {f"{name} of fp64": both(name, dtype=torch.float64, shape=(32, 32)) for name in ("mxfp8", "nvfp4_rht_sr")}
    return half | full | small | double


def _shapes() -> dict[str, Case]:
    ragged = ((1, 128), (128, 1), (1, 1), (130, 200), (33, 7), (5,), (), (0, 128), (128, 0), (3, 5, 7), (260, 3))
    whole = ((16, 16), (32, 32), (16, 48), (144, 80), (2, 32, 96), (32, 288), (272, 64), (1, 32), (32, 1), (1, 16))
    cases = {
        f"{name} of {list(shape)}": both(name, shape=shape, numbers="normal")
        for name in ("fp8", "fp8_sr", "fp8_block", "fp8_block_2d", "ragged_mx_sr", "int8_blocks")
        for shape in ragged
    }
    cases |= {
        f"{name} of {list(shape)}": both(name, shape=shape, numbers="normal")
        for name in ("mxfp8", "nvfp4_rht_sr", "nvfp4_2d", "nvfp4_row_scaled_sr", "mxfp6_e2m3", "blocks_of_8_sr")
        for shape in whole
    }
    return {name: case for name, case in cases.items() if case.encodings()}


def _layouts() -> dict[str, Case]:
    layouts = (
        "part of rows",
        "every second column",
        "transposed",
        "at an odd place",
        "the same row",
        "the same column",
    )
    cases = {
        f"{name}, {layout}": both(name, layout=layout)
        for name in ("mxfp8", "nvfp4_rht_sr", "nvfp4_row_scaled", "fp8_block_2d")
        for layout in layouts
    }
    for name in ("mxfp8", "nvfp4_rht", "fp8"):
        cases[f"{name}, negated later"] = both(name, layout="negated later", dtype=_FP32)
    for name in ("mxfp8", "mxfp4", "nvfp4_rht_sr", "nvfp4_row_scaled", "fp8", "mxfp6_e2m3"):
        for offset in (4, 8, 1, 2):
            cases[f"{name}, planes {offset} bytes behind a boundary"] = both(name, offset=offset)
    for name in ("mxfp8", "mxfp8_sr", "mxfp8_2d", "two_rows"):
        cases[f"{name}, columns stored one after the other"] = both(name, blocked_columns=True)
    return cases


def _positions() -> dict[str, Case]:
    inside = {
        "aligned": Within(32, 64, 4096),
        "at a multiple of four": Within(4, 12, 201),
        "at an odd place": Within(7, 9, 1001),
        "far away": Within(1 << 20, 1 << 14, 1 << 15),
        "very far away": Within((1 << 33) + 4, 64, 4096),
    }
    return {
        f"{name} within, {where}": both(name, within=within, numbers="normal")
        for name in ("mxfp8_sr", "nvfp4_rht_sr", "mxfp6_e2m3_sr", "fp8_sr")
        for where, within in inside.items()
    }


def _amaxes() -> dict[str, Case]:
    values = (0.0, math.inf, math.nan, 1e-45, 1e-38, 1e-30, 1e-3, 1e30, 3.4e38)
    cases = {
        f"{name} under an amax of {amax}": both(name, amax=amax, numbers="normal", shape=(32, 64))
        for name in (
            "nvfp4",
            "nvfp4_rht_sr",
            "nvfp4_row_scaled",
            "nvfp4_4over6_mse",
            "nvfp4_ue5m3",
            "fp8",
            "fp8_pow2_eps",
        )
        for amax in values
    }
    scales = (0.0, math.inf, math.nan, 1e-45, 1e30, -2.0)
    return cases | {
        f"fp8_delayed with a scale of {scale}": both("fp8_delayed", scale=scale, numbers="infinite", shape=(64, 32))
        for scale in scales
    }


def _seeds() -> dict[str, Case]:
    return {
        f"{name} with the seed {seed}": both(name, seed=seed, shape=(32, 32), numbers="normal")
        for name in ("mxfp8_sr", "nvfp4_rht_sr")
        for seed in (0, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63))
    }


def _pairs() -> dict[str, Case]:
    pairs = (
        ("mxfp8", "nvfp4_rht_sr"), ("mxfp8", "nvfp4"), ("mxfp8", "mxfp8_e5m2"), ("fp8", "nvfp4_rht"),
        ("nvfp4", "mxfp8"), ("nvfp4_rotated_rows", "mxfp8"), ("nvfp4_row_scaled", "mxfp8_e5m2"), ("mxfp4_sr", "mxfp8"),
        ("mxfp6_e3m2", "nvfp4_rht_sr"), ("fp8_block", "mxfp4"), ("mxfp8", "nvfp4_4over6_448"), ("fp8_block_2d", "fp8"),
        ("mxfp8", "nvfp4_2d_sr"), ("nvfp4_2d", "fp8_block_2d"), ("blocks_of_8", "flat_tiles"),
        ("mxfp8_2d", "mxfp4_sr"),
    )  # fmt: skip
    cases = {f"{row} + {column}": Case((row,), (column,)) for row, column in pairs}
    for name in ("mxfp8", "nvfp4_rht_sr", "fp8"):
        cases[f"{name} twice"] = Case((name, name), (name, name))
        cases[f"{name}, rows only"] = Case((name,))
        cases[f"{name}, columns only"] = Case((), (name,))
    cases["mxfp8 + nvfp4_rht_sr of [160, 96]"] = Case(("mxfp8",), ("nvfp4_rht_sr",), (160, 96))
    cases["three of the same direction"] = Case(("mxfp8", "nvfp4", "fp8_sr"), ("mxfp4",))
    cases["with some that have no kernels"] = Case(("mxfp8", "hifloat8"), ("mxfp8_philox", "nvfp4_rht_sr"), (32, 32))
    return cases


CASES: dict[str, Case] = {
    **_by_encoding(),
    **_pairs(),
    **_of_numbers(),
    **_of_dtypes(),
    **_shapes(),
    **_layouts(),
    **_positions(),
    **_amaxes(),
    **_seeds(),
    **{name: both(name, shape=(96, 96)) for name in REFERENCE_ENCODINGS},
}
