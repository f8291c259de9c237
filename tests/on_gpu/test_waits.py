"""The host does not wait for the GPU."""

from __future__ import annotations

import pytest

from .waits import check_waits


@pytest.mark.usefixtures("triton_backend")
def test_the_host_waits_only_where_it_may(gpu, time_for, tell):
    tell(check_waits(gpu, time_for(0.15)))
