"""Tests that need the interpreter: they are collected only where TRITON_INTERPRET is set before Triton is imported."""

from __future__ import annotations

import os

import pytest

from crossgrain.kernels.backend import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The Triton backend, which launches interpreted kernels on CPU tensors."""
    from crossgrain.kernels import choice

    found = choice.backend_for("cpu")
    assert found.name == "triton", "these tests run with -p tests.gpu.kernels.on_triton"
    return found
