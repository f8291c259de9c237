"""Fixtures: every quantizer, and per-tensor FP8 with and without a transposed copy."""

from collections.abc import Iterator

import pytest
import torch

import crossgrain as cg
from crossgrain.runtime import logs

from .common import ranks
from .common.instruction_sets import avoid_illegal_instructions
from .common.logs import silent
from .common.quantizers import QUANTIZERS

_AVOIDED = avoid_illegal_instructions()  # before anything is multiplied, and inherited by workers and ranks


def _cases() -> list:
    modes = [pytest.param((name, True), id=name) for name in QUANTIZERS]
    return modes + [pytest.param((name, False), id=f"{name}-transposing") for name in QUANTIZERS if "fp8" in name[:4]]


def _turn(item: pytest.Item) -> int:
    if item.path.stem == "test_warmup":
        return 0
    used = vars(getattr(item, "module", None) or object).values()
    return 2 if any(each is ranks or each is ranks.run for each in used) else 1


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out groups in the order below, not the largest first."""
    config.option.loadscopereorder = False


def pytest_report_header() -> list[str]:
    """Say which instructions of this machine are not used, and why."""
    return [] if _AVOIDED is None else [_AVOIDED]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the order of tests, and let ``xdist_group`` keep tests on one worker, with pytest 9.2 as well.

    What all kernels are compiled by comes first, so that others find them on disk; tests that start ranks come last,
    because each rank would compile for itself what is not there.

    With ``--dist loadgroup``, workers of pytest-xdist 3.8 append the group to the name of a test by setting
    ``_nodeid``, and tests are handed out by that. From 9.2 on, pytest keeps the name in ``_id`` instead.
    """
    items.sort(key=_turn)
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


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """What is logged once is logged once in each test."""
    logs.forget()


@pytest.fixture
def silently() -> Iterator[None]:
    """No warning in the whole test."""
    with silent():
        yield


@pytest.fixture
def x() -> torch.Tensor:
    """A matrix that every format can take, with a zero block and a large outlier."""
    values = torch.randn(128, 256)
    values[:, 32:64] = 0
    values[3, 5] = 100.0
    return values.to(torch.bfloat16)
