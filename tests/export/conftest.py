"""Exports move bytes, whichever kernels made them: the reference needs no compiling."""

import pytest

import crossgrain as cg


@pytest.fixture(autouse=True)
def reference():
    cg.set_backend("reference")
    yield
    cg.set_backend("auto")
