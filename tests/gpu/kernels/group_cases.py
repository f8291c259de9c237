"""What kernels are tried on with groups of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Within
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction

from .formats import ALL


@dataclass(frozen=True)
class GroupCase:
    """Groups of rows, and the planes that one call writes for all of them. See `Case`."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    heights: tuple[int, ...] = (64, 0, 32, 160)
    width: int = 32
    dtype: torch.dtype = torch.bfloat16
    numbers: str = "mixed"
    layout: str = "contiguous"
    offset: int = 64
    scales: tuple[float, ...] | None = None
    within: Within | None = None

    def encodings(self) -> list[tuple[Direction, Encoding]]:
        """The planes to write."""
        return [(ROWWISE, ALL[name](ROWWISE)) for name in self.rows] + [
            (COLUMNWISE, ALL[name](COLUMNWISE)) for name in self.columns
        ]


def _groups() -> dict[str, GroupCase]:
    pairs = (
        ("mxfp8", "mxfp8"), ("mxfp8", "nvfp4_rht_sr"), ("nvfp4", "nvfp4_rht"), ("fp8", "fp8"), ("fp8_sr", "fp8_sr"),
        ("fp8_block", "fp8_block"), ("nvfp4_row_scaled", "nvfp4_row_scaled"), ("nvfp4_2d", "nvfp4_2d"),
        ("mxfp4_sr", "mxfp4_sr"), ("mxfp6_e2m3", "mxfp6_e2m3"), ("fp8_block_2d", "mxfp8_2d"), ("fp8_pow2_eps", "mxfp8"),
        ("nvfp4_row_scaled_sr", "nvfp4_row_scaled_4over6"), ("block_major", "nv_block_major"),
    )  # fmt: skip
    cases = {f"groups, {row} + {column}": GroupCase((row,), (column,)) for row, column in pairs}
    for name in ("mxfp8", "nvfp4_rht_sr"):
        cases |= {
            f"groups, {name}, rows only": GroupCase((name,)),
            f"groups, {name}, columns only": GroupCase((), (name,)),
            f"one group, {name}": GroupCase((name,), (name,), (160,)),
            f"many groups, {name}": GroupCase((name,), (name,), (32, 0, 0, 64, 32, 32, 0, 96, 32, 0), 32),
            f"empty groups, {name}": GroupCase((name,), (name,), (0, 0)),
            f"groups, {name}, part of rows": GroupCase((name,), (name,), layout="part of rows"),
            f"groups, {name}, transposed": GroupCase((name,), (name,), layout="transposed"),
            f"groups, {name}, planes at an odd place": GroupCase((name,), (name,), offset=1),
            f"groups, {name}, planes 4 bytes behind a boundary": GroupCase((name,), (name,), offset=4),
            f"groups, {name}, twice": GroupCase((name, name), (name, name)),
            f"groups, {name}, within": GroupCase((name,), (name,), within=Within(64, 16, 1000)),
        }
    cases |= {
        "groups, odd heights, fp8": GroupCase(("fp8",), ("fp8_sr",), (3, 0, 50, 1), 37),
        "groups, odd heights, fp8_block": GroupCase(("fp8_block",), ("fp8_block_2d",), (3, 0, 150, 1), 37),
        "groups, given scales": GroupCase(("fp8_delayed",), ("fp8_delayed",), scales=(1.0, 2.0, 0.25, 16.0)),
        "no groups": GroupCase(("mxfp8",), ("mxfp8",), ()),
        "groups of fp64": GroupCase(("mxfp8",), ("mxfp8",), (32, 32), 32, torch.float64),
        "groups, nv_rotated_rows_scaled": GroupCase(("nv_rotated_rows_scaled",), ("nv_rotated_rows_scaled",)),
        "groups without kernels": GroupCase(("hifloat8",), ("mxfp8",), (32, 0, 32), 32),
        "groups, philox": GroupCase(("mxfp8_philox",), ("nvfp4_rht_sr",), (32, 0, 32), 32),
        "groups of 48 and 16 rows": GroupCase(("nvfp4",), ("nvfp4_rht_sr",), (48, 16, 144), 80),
    }
    return cases


GROUP_CASES = _groups()
