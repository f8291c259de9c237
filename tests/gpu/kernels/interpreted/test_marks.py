"""Interpreted kernels mark NaNs and infinities as the reference does."""

from __future__ import annotations

import pytest

from crossgrain.kernels.backend import Backend

from ..marking import BAD, FORMATS, check_marked_groups, check_marks

_QUICK = {("fp8", "inf"), ("nvfp4_rht", "nan"), ("mxint8", "nothing")}


@pytest.mark.parametrize(
    "name, bad",
    [
        pytest.param(name, bad, marks=() if (name, bad) in _QUICK else pytest.mark.long)
        for name in FORMATS
        for bad in BAD
    ],
)
def test_marks(backend: Backend, name: str, bad: str) -> None:
    check_marks(backend, FORMATS[name], bad)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_rht"])
def test_groups(backend: Backend, name: str) -> None:
    check_marked_groups(backend, FORMATS[name], "nan")
