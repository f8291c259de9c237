"""Interpreted kernels mark NaNs and infinities as the reference does."""

from __future__ import annotations

import pytest

from crossgrain.kernels.backend import Backend

from ..marking import BAD, FORMATS, check_marked_groups, check_marks

_QUICK = ("fp8", "nvfp4_rht", "mxint8")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]
)
def test_marks(backend: Backend, name: str, bad: str) -> None:
    check_marks(backend, FORMATS[name], bad)


@pytest.mark.parametrize("name", ["nvfp4", *(pytest.param(n, marks=pytest.mark.long) for n in ("fp8", "nvfp4_rht"))])
def test_groups(backend: Backend, name: str) -> None:
    check_marked_groups(backend, FORMATS[name], "nan")
