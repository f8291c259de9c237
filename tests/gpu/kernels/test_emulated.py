"""Compiled kernels, run by the emulator of PTX, give the bits of the reference on every kind of GPU.

The emulator ends a run at races, at accesses out of bounds or not aligned, and at instructions that are not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from crossgrain.formats import E4M3, E5M2, Format, fp8_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Backend, Target
from crossgrain.kernels.triton import arguments, backend, finishing, reading
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane, shape_problem

from ..offline import Built
from ..ptx import Report
from . import emulated
from .agreement import assert_same, check_case, check_groups, check_reading
from .cases import CASES, Case
from .finishing import ENDS, QUICK_ENDS, check_end
from .formats import ENCODINGS, REFERENCE_ENCODINGS, WITH_KERNELS
from .group_cases import GROUP_CASES, GroupCase
from .matrices import matrix
from .planes import arbitrary_plane

TARGETS = tuple(emulated.CAPABILITIES)
MOST = ("sm_90", "sm_100")  # the conversion instructions of these two have everything that others have
QUICK = {("sm_90", "mxfp8"), ("sm_90", "mxfp8 + nvfp4_rht_sr of [160, 96]")}
NAMES = [name for name in ENCODINGS if not name.endswith("_sr")]


class Watched:
    """What the launches of a test were like.

    The emulator follows undefined bytes, and ends a run where one reaches memory, an address or a predicate. A register
    that is read before it was written is no fault by itself: LLVM moves unused halves of pairs along.
    """

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, built: Built, passed: dict[str, Any], report: Report) -> None:
        assert not built.inexact, f"instructions that are not exact: {built.inexact}"
        assert not report.races
        self.launches += 1


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Counts launches, and asserts that there were some."""
    seen = Watched()
    yield seen
    assert seen.launches, "nothing was launched"


def _on_targets() -> Iterator[object]:
    """All cases on two targets, and those of built-in formats on the others."""
    built_in = {name for name in ENCODINGS if name.removesuffix("_sr") not in WITH_KERNELS}
    for name, case in CASES.items():
        everywhere = name in built_in or " + " in name
        for target in TARGETS if everywhere else MOST:
            if case.dtype == torch.float64 or name in REFERENCE_ENCODINGS:
                continue  # nothing is launched
            marks = [] if (target, name) in QUICK else [pytest.mark.long]
            yield pytest.param(target, case, id=f"{target} {name}", marks=marks)


@pytest.mark.parametrize("target, case", list(_on_targets()))
def test_writing(target: str, case: Case) -> None:
    check_case(emulated.backend(target, Watched()), case, read=False)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", GROUP_CASES.values(), ids=GROUP_CASES)
def test_groups(target: str, case: GroupCase) -> None:
    check_groups(emulated.backend(target, Watched()), case)


def test_reading(watched: Watched) -> None:
    """Every code under every scale: rotated, and with other scales for each row."""
    with_columns = arbitrary_plane(ENCODINGS["nvfp4_rht"](COLUMNWISE).format, COLUMNWISE, (48, 32))
    assert with_columns.format.rotation is not None
    emulator = emulated.backend("sm_90", watched)
    for dtype in (torch.bfloat16, torch.float32):
        assert_same(emulator.decode(with_columns, dtype), REFERENCE.decode(with_columns, dtype), f"{dtype}")


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_reading_everything(target: str, name: str, watched: Watched) -> None:
    emulator = emulated.backend(target, watched)
    for direction in (ROWWISE, COLUMNWISE):
        fmt = ENCODINGS[name](direction).format
        shape = (160, 32) if shape_problem(fmt, direction, (160, 32)) is None else (64, 64)
        check_reading(emulator, arbitrary_plane(fmt, direction, shape))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("amax", [0.0, 1e-45, 3.4e38, float("inf"), float("nan")])
def test_reading_under_any_amax(target: str, amax: float, watched: Watched) -> None:
    emulator = emulated.backend(target, watched)
    for name in ("nvfp4", "nvfp4_rht", "nvfp4_2d", "nvfp4_ue5m3"):
        check_reading(emulator, arbitrary_plane(ENCODINGS[name](COLUMNWISE).format, COLUMNWISE, (48, 32), amax=amax))


def test_ends_of_products(watched: Watched) -> None:
    check_end(emulated.backend("sm_90", watched), QUICK_ENDS[1])


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_all_ends_of_products(target: str, watched: Watched) -> None:
    emulator = emulated.backend(target, watched)
    for end in ENDS:
        check_end(emulator, end)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_amaxes_and_swizzled_scales(target: str, watched: Watched) -> None:
    emulator = emulated.backend(target, watched)
    for shape in ((), (7,), (3, 5, 7), (512,), (20, 512)):
        for numbers in ("mixed", "nans", "infinite", "subnormal"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = matrix(numbers, shape, dtype)
                assert_same(emulator.amax(x), REFERENCE.amax(x), f"{numbers} {dtype} {shape}")
    for rows, blocks in ((1, 1), (130, 9), (128, 4), (300, 37)):
        scales = torch.arange(rows * blocks).to(torch.uint8).view(rows, blocks)
        for each in (scales, scales.t()):
            assert_same(emulator.swizzle_scales(each), REFERENCE.swizzle_scales(each), f"{each.shape}")


@pytest.mark.long
@pytest.mark.parametrize("target", MOST)
def test_offsets_of_64_bits(target: str, monkeypatch: pytest.MonkeyPatch, watched: Watched) -> None:
    """The kernels for large matrices, on small ones."""
    for module in (backend, reading, finishing):
        assert module.FAR == arguments.FAR
        monkeypatch.setattr(module, "FAR", 1)
    emulator = emulated.backend(target, watched)
    for name in (
        "mxfp8",
        "mxfp8 + nvfp4_rht_sr",
        "mxfp6_e2m3",
        "fp8_block of [130, 200]",
        "nvfp4_row_scaled, transposed",
    ):
        check_case(emulator, CASES[name])
    check_groups(emulator, GROUP_CASES["groups, mxfp8 + nvfp4_rht_sr"])
    for end in QUICK_ENDS:
        check_end(emulator, end)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_casts_of_every_kind_of_number(target: str, watched: Watched) -> None:
    """All bf16 numbers, and arbitrary ones of fp32, under a scale of 1: only the cast is left."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).view(256, 256)
    case = Case(("fp8_delayed", "fp8_sr"), scale=1.0, numbers="patterns", dtype=torch.float32, shape=(256, 256))
    emulator = emulated.backend(target, watched)
    check_case(emulator, case, read=False)
    for element in (E4M3, E5M2):
        codes = [_cast(each, every, fp8_format(element)) for each in (emulator, REFERENCE)]
        assert_same(codes[0], codes[1], element.name)


def _cast(each: Backend, x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The codes of numbers under a scale of 1."""
    plane = empty_plane(fmt, ROWWISE, x.shape, device=x.device)
    each.encode(x, [Target(plane, Encoding(fmt), None, torch.ones(1))], None)
    return plane.data
