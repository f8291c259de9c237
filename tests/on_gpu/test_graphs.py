"""Steps in CUDA graphs. They are only reported."""

from __future__ import annotations

import pytest

from .finding import attempted
from .graphs import check_graph


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "hybrid", "fp8", "fp8_delayed", "fp8_block"])
def test_a_step_in_a_cuda_graph(gpu, tell, recipe):
    tell(attempted(lambda: check_graph(recipe, gpu)), only_report=True)
