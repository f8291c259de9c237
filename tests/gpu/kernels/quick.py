"""The cases for every run of the tests. All others are marked as long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from .cases import CASES
from .group_cases import GROUP_CASES

QUICK = (
    "mxfp8 + nvfp4_rht_sr",
    "three of the same direction",
    "with some that have no kernels",
    "fp8",
    "fp8_delayed",
    "fp8_block of fp16, small",
    "fp8_block_2d_pow2",
    "mxfp8_2d_e5m2 of patterns numbers",
    "mxfp8 of infinite numbers",
    "mxfp6_e3m2",
    "mxint8_sr",
    "flat_tiles",
    "nv_e1m2",
    "nvfp4_2d_4over6_mse",
    "nvfp4_row_scaled",
    "nvfp4_ue5m3 of subnormal numbers",
    "fp8_block of [33, 7]",
    "fp8_sr of [128, 1]",
    "fp8 of [0, 128]",
    "mxfp8, transposed",
    "mxfp8, negated later",
    "nvfp4_rht_sr, part of rows",
    "nvfp4_rht_sr, planes 1 bytes behind a boundary",
    "mxfp8_sr, columns stored one after the other",
    "mxfp8_sr within, at an odd place",
    "nvfp4_rht_sr within, far away",
    "nvfp4 under an amax of nan",
    "nvfp4 under an amax of 1e-45",
    "mxfp8_sr with the seed -1",
)
QUICK_GROUPS = (
    "groups, mxfp8 + nvfp4_rht_sr",
    "groups, odd heights, fp8",
    "groups, mxfp8, twice",
    "empty groups, mxfp8",
)


def long_unless(quick: Iterable[object], values: Mapping[str, object]) -> list[object]:
    """Values by name for `pytest.mark.parametrize`. Those that are not among ``quick`` are marked as long.

    ``quick`` has names or values.
    """
    quick = list(quick)
    missing = [each for each in quick if each not in values and each not in values.values()]
    assert not missing, f"not found: {missing}"
    return [
        pytest.param(value, id=name, marks=[] if name in quick or value in quick else [pytest.mark.long])
        for name, value in values.items()
    ]


def parameters() -> list[object]:
    """All of `CASES` for `pytest.mark.parametrize`."""
    return long_unless(QUICK, CASES)


def group_parameters() -> list[object]:
    """All of `GROUP_CASES`."""
    return long_unless(QUICK_GROUPS, GROUP_CASES)
