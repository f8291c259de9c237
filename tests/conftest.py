"""Fixtures: every quantizer, and per-tensor FP8 with and without a transposed copy."""

from collections.abc import Iterator

import pytest
import torch

import crossgrain as cg

from .common.quantizers import QUANTIZERS


def _cases() -> list:
    modes = [pytest.param((name, True), id=name) for name in QUANTIZERS]
    return modes + [pytest.param((name, False), id=f"{name}-transposing") for name in QUANTIZERS if "fp8" in name[:4]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``xdist_group`` keep tests on one worker, with pytest 9.2 as well.

    With ``--dist loadgroup``, workers of pytest-xdist 3.8 append the group to the name of a test by setting
    ``_nodeid``, and tests are handed out by that. From 9.2 on, pytest keeps the name in ``_id`` instead.
    """
    for item in items:
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item.id).parse(named)


@pytest.fixture(params=_cases())
def quantizer(request: pytest.FixtureRequest) -> Iterator[cg.Quantizer]:
    name, one_buffer = request.param
    with cg.settings.override(non_tn_fp8_gemm=one_buffer):
        yield QUANTIZERS[name]()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


@pytest.fixture
def x() -> torch.Tensor:
    """A matrix that every format can take, with a zero block and a large outlier."""
    values = torch.randn(128, 256)
    values[:, 32:64] = 0
    values[3, 5] = 100.0
    return values.to(torch.bfloat16)
