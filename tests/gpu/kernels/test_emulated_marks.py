"""Compiled kernels mark NaNs and infinities as the reference does."""

from __future__ import annotations

import pytest

from . import emulated
from .marking import FORMATS, check_marked_groups, check_marks


@pytest.mark.long
@pytest.mark.parametrize("bad", ["nothing", "nan", "inf"])
@pytest.mark.parametrize("target", emulated.CAPABILITIES)
@pytest.mark.parametrize("name", FORMATS)
def test_marks(name: str, target: str, bad: str) -> None:
    check_marks(emulated.backend(target), FORMATS[name], bad)


@pytest.mark.long
@pytest.mark.parametrize("target", emulated.CAPABILITIES)
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_rht", "nvfp4_row_scaled", "mxfp4"])
def test_groups(name: str, target: str) -> None:
    check_marked_groups(emulated.backend(target), FORMATS[name], "nan")
