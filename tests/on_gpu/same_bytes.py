"""The cases of the Triton backend on a device, against the reference on the CPU: every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crossgrain.kernels import REFERENCE, Backend
from crossgrain.planes import COLUMNWISE, ROWWISE, shape_problem

from ..gpu.kernels.agreement import assert_same, check_case, check_groups, check_reading
from ..gpu.kernels.cases import CASES
from ..gpu.kernels.finishing import ENDS, check_end
from ..gpu.kernels.formats import ALL
from ..gpu.kernels.group_cases import GROUP_CASES
from ..gpu.kernels.matrices import matrix
from ..gpu.kernels.planes import arbitrary_plane
from ..gpu.kernels.quick import QUICK, QUICK_GROUPS
from .finding import Deadline, Finding, check_each
from .through_device import ThroughDevice

_SWIZZLED = ((1, 1), (130, 9), (128, 4), (300, 37))
_MEASURED: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5, 7), (512,), (20, 512), (2, 3, 256))

Check = Callable[[Backend], None]


def all_checks() -> dict[str, Check]:
    """Every case by name. The ones that show most come first, because time may end."""
    checks: dict[str, Check] = {}
    for name in sorted(CASES, key=lambda name: name not in QUICK):
        checks[f"writing, {name}"] = _of_case(check_case, CASES[name], read=False)
    for name in sorted(GROUP_CASES, key=lambda name: name not in QUICK_GROUPS):
        checks[name] = _of_case(check_groups, GROUP_CASES[name])
    for name in (name for name in ALL if not name.endswith("_sr")):
        checks[f"reading, {name}"] = _reading(name)
    for number, end in enumerate(ENDS):
        checks[f"end of a GEMM {number}: {end}"] = _of_case(check_end, end)
    checks |= {f"swizzling {list(shape)}": _swizzling(shape) for shape in _SWIZZLED}
    checks |= {f"amaxes {list(shape)}": _measuring(shape) for shape in _MEASURED}
    return checks


def check_bytes(backend: Backend, device: torch.device, deadline: Deadline, shard: int = 0, shards: int = 1) -> Finding:
    """Run every case whose number is ``shard`` modulo ``shards``.

    Compiling takes most of the time, so that several processes, each with a shard, are faster.
    """
    through: Any = ThroughDevice(backend, device)
    mine = list(all_checks().items())[shard::shards]
    return check_each(mine, lambda check: check(through), deadline)


def _of_case(check: Callable[..., None], case: object, **options: object) -> Check:
    return lambda backend: check(backend, case, **options)


def _reading(name: str) -> Check:
    """Every code under every scale."""

    def check(backend: Backend) -> None:
        for direction in (ROWWISE, COLUMNWISE):
            fmt = ALL[name](direction).format
            shape = (160, 32) if shape_problem(fmt, direction, (160, 32)) is None else (96, 96)
            check_reading(backend, arbitrary_plane(fmt, direction, shape))

    return check


def _swizzling(shape: tuple[int, int]) -> Check:
    def check(backend: Backend) -> None:
        generator = torch.Generator().manual_seed(0)
        scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        for given in (scales, scales.t().contiguous().t()):
            assert_same(backend.swizzle_scales(given), REFERENCE.swizzle_scales(scales), "swizzled")

    return check


def _measuring(shape: tuple[int, ...]) -> Check:
    def check(backend: Backend) -> None:
        for numbers in ("mixed", "nans", "infinite", "subnormal"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                x = matrix(numbers, shape, dtype)
                assert_same(backend.amax(x), REFERENCE.amax(x), f"{numbers} {dtype}")

    return check
