"""Tests with more than 2**31 numbers, which run only if they are asked for: ``make test-large``."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from crossgrain import kernels

from .parts import filled


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any(Path(arg.partition("::")[0]).resolve().is_relative_to(Path(__file__).parent) for arg in config.args)
    return None if asked else True


@pytest.fixture
def needs() -> Iterator[Callable[[float], None]]:
    """``needs(5.5)`` skips a test if there are not so many gigabytes of memory, beside what is allocated already."""

    def check(gigabytes: float) -> None:
        gc.collect()
        kernels.free_workspaces()
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024 / 1e9
        if available < gigabytes + 1:
            pytest.skip(f"needs {gigabytes} GB of memory and 1 GB to spare; {available:.1f} GB are available")

    yield check
    gc.collect()
    kernels.free_workspaces()


@pytest.fixture(scope="module")
def tall() -> Iterator[torch.Tensor]:
    """bfloat16, 4.3 GB; the tests of a module share it, and do not write to it."""
    yield filled(torch.bfloat16)
    gc.collect()
