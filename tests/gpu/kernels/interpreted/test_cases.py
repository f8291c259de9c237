"""Interpreted kernels write, read and finish with the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from crossgrain.kernels import REFERENCE
from crossgrain.kernels.backend import Backend
from crossgrain.planes import COLUMNWISE, ROWWISE, shape_problem

from ..agreement import assert_same, check_case, check_groups, check_reading
from ..cases import Case
from ..finishing import ENDS, QUICK_ENDS, End, check_end
from ..formats import ALL
from ..group_cases import GroupCase
from ..interpreter import checked_launch
from ..matrices import matrix
from ..planes import arbitrary_plane
from ..quick import group_parameters, long_unless, parameters

_QUICK_READING = ("mxfp8", "nvfp4_rht", "nvfp4_row_scaled", "mxfp6_e3m2")


@pytest.mark.parametrize("case", parameters())
def test_writing(backend: Backend, case: Case) -> None:
    check_case(backend, case, read=False)


@pytest.mark.parametrize("case", group_parameters())
def test_groups(backend: Backend, case: GroupCase) -> None:
    check_groups(backend, case)


@pytest.mark.parametrize("name", long_unless(_QUICK_READING, {name: name for name in ALL if not name.endswith("_sr")}))
def test_reading(backend: Backend, name: str) -> None:
    """Every code under every scale."""
    for direction in (ROWWISE, COLUMNWISE):
        fmt = ALL[name](direction).format
        shape = (160, 32) if shape_problem(fmt, direction, (160, 32)) is None else (96, 96)
        check_reading(backend, arbitrary_plane(fmt, direction, shape))


@pytest.mark.long
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-39, 1e30, 3.4e38, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht", "nvfp4_2d", "nvfp4_ue5m3", "nvfp4_max256", "nv_to_4"])
def test_reading_under_any_amax(backend: Backend, name: str, amax: float) -> None:
    for direction in (ROWWISE, COLUMNWISE):
        check_reading(backend, arbitrary_plane(ALL[name](direction).format, direction, (48, 32), amax=amax))


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("two_rows", marks=pytest.mark.long)])
def test_reading_columns_that_are_stored_one_after_the_other(backend: Backend, name: str) -> None:
    plane = arbitrary_plane(ALL[name](COLUMNWISE).format, COLUMNWISE, (160, 32), blocked_columns=True)
    assert plane.has_whole_rows
    check_reading(backend, plane)


@pytest.mark.parametrize("end", long_unless(QUICK_ENDS, {str(end): end for end in ENDS}))
def test_ends_of_products(backend: Backend, end: End) -> None:
    check_end(backend, end)


@pytest.mark.parametrize("shape", [(1, 1), (130, 9), (128, 4), (300, 37)])
def test_swizzled_scales(backend: Backend, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    assert_same(backend.swizzle_scales(scales), REFERENCE.swizzle_scales(scales), "swizzled")
    turned = scales.t().contiguous().t()
    assert_same(backend.swizzle_scales(turned), REFERENCE.swizzle_scales(scales), "swizzled from columns")


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 7), (512,), (20, 512), (2, 3, 256)], ids=str)
def test_amaxes(backend: Backend, shape: tuple[int, ...]) -> None:
    for numbers in ("mixed", "nans", "infinite", "subnormal"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            x = matrix(numbers, shape, dtype)
            assert_same(backend.amax(x), REFERENCE.amax(x), f"{numbers} {dtype}")


@triton.jit
def _cast_kernel(x, y, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(y + at, tl.load(x + at).to(tl.float32))


def test_accesses_outside_of_the_arguments_are_found() -> None:
    x = torch.zeros(16, dtype=torch.bfloat16)
    checked_launch(_cast_kernel, 1, x.device, 1, {"x": x, "y": torch.zeros(16), "B": 16})
    for short in ({"x": x[:8].clone(), "y": torch.zeros(16)}, {"x": x, "y": torch.zeros(15)}):
        with pytest.raises(InterpreterError, match="outside of all arguments"):
            checked_launch(_cast_kernel, 1, x.device, 1, {**short, "B": 16})


def test_the_interpreter_casts_every_bf16_number_exactly() -> None:
    """Triton's own cast is wrong for subnormal numbers; see `interpreter.correct`."""
    x = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    y = torch.empty(1 << 16)
    checked_launch(_cast_kernel, 1, x.device, 1, {"x": x, "y": y, "B": 1 << 16})
    assert_same(y, x.to(torch.float32), "cast")
