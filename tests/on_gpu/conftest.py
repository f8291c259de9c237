"""The GPU, the time, and how a check tells what it has found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from crossgrain.cli.checkup.gpus import why_no_gpu
from crossgrain.kernels import Backend
from crossgrain.kernels.choice import backend_for

from .finding import Deadline, Finding
from .recorder import FINDING


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The current GPU; tests are skipped where there is none."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(f"no GPU: {reason}")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def triton_backend(gpu: torch.device) -> Backend:
    """The Triton backend; without Triton there is nothing to test."""
    backend = backend_for(gpu.type)
    if backend.name != "triton":
        pytest.fail("GPU tensors are served by the reference: install Triton (pip install 'crossgrain[gpu]')")
    return backend


@pytest.fixture
def time_for(pytestconfig: pytest.Config) -> Callable[[float], Deadline]:
    """A deadline after a share of the time of all checks."""
    minutes = float(pytestconfig.getoption("minutes", 10.0))
    return lambda share: Deadline(60 * minutes * share)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record a finding, and fail if it has problems, unless it is only to be reported."""

    def told(finding: Finding, *, only_report: bool = False) -> None:
        record_property(FINDING, finding.as_data())
        if not only_report:
            assert finding.problems == []

    return told
