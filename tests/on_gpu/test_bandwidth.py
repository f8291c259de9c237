"""Bytes per second of the kernels. They are only reported."""

from __future__ import annotations

import pytest

from .bandwidth import PLANES, check_bandwidth
from .finding import attempted


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("name", PLANES)
def test_bandwidth(gpu, tell, name):
    tell(attempted(lambda: check_bandwidth(name, gpu)), only_report=True)
