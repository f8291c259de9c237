"""Every case of the kernels, byte for byte, and golden vectors. Shards run in several processes, with ``-n``."""

from __future__ import annotations

import os

import pytest

from .goldens import check_goldens
from .same_bytes import check_bytes

SHARDS = 8
TESTS = SHARDS + 1
SHARE = 0.35 * min(1.0, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) / TESTS)
"""The time of each test. Workers run them at the same time."""


@pytest.mark.usefixtures("triton_backend")
def test_golden_vectors(gpu, time_for, tell):
    tell(check_goldens(gpu, time_for(SHARE)))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_cases_of_kernels(gpu, triton_backend, time_for, tell, shard):
    tell(check_bytes(triton_backend, gpu, time_for(SHARE), shard, SHARDS))
