"""Write the planes of a case with two backends, read them, and compare every byte.

Each buffer lies in the middle of memory that nobody else uses, and this memory is compared as well: a byte that is
written beside a buffer is found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crossgrain.kernels import REFERENCE, Backend, GroupedTarget, Target
from crossgrain.planes import COLUMNWISE, Plane, empty_plane
from crossgrain.planes.groups import empty_groups
from crossgrain.planes.plane import stored_by_columns

from .cases import Case
from .group_cases import GroupCase
from .matrices import matrix

_CPU = torch.device("cpu")
_PATTERN = 0xA5
_BEHIND = 80


def check_case(backend: Backend, case: Case, *, read: bool = True) -> None:
    """Assert that a backend measures, writes and (with ``read``) reads as the reference does."""
    mine, theirs = (_written(each, case) for each in (backend, REFERENCE))
    assert mine, f"no plane fits the shape {case.shape}"
    for ours, expected in zip(mine, theirs, strict=True):
        ours.assert_equals(expected)
        if read:
            check_reading(backend, expected.target.plane)


def check_groups(backend: Backend, case: GroupCase) -> None:
    """Assert that a backend measures and writes groups as the reference does."""
    mine, theirs = (_written_groups(each, case) for each in (backend, REFERENCE))
    for ours, expected in zip(mine, theirs, strict=True):
        ours.assert_equals(expected)


def check_reading(backend: Backend, plane: Plane) -> None:
    """Assert that a backend decodes a plane as the reference does, to every dtype and operand."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert_same(backend.decode(plane, dtype), REFERENCE.decode(plane, dtype), f"decoded to {dtype}")
    operand = REFERENCE.decode_operand(plane)
    assert_same(backend.decode_operand(plane), operand, "operand")
    assert_same(backend.decode_bf16(plane), REFERENCE.decode_bf16(plane), "bf16 operand")
    around, workspace = guarded((operand.numel(),), torch.float32, 16)
    assert_same(backend.decode_operand(plane, workspace), operand, "operand in a workspace")
    beside = torch.cat((around[:16], around[16 + 4 * operand.numel() :]))
    assert (beside == _PATTERN).all(), "bytes beside the workspace were written"


def assert_same(mine: Tensor, theirs: Tensor, what: str) -> None:
    """Equal shapes, dtypes and bits; NaNs may have any sign and payload."""
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, what
    if mine.dtype.is_floating_point:
        assert torch.equal(mine.isnan(), theirs.isnan()), f"{what}: NaNs in other places"
        mine, theirs = (torch.where(each.isnan(), 0.0, each) for each in (mine, theirs))
    mine, theirs = (each.contiguous().flatten().view(torch.uint8) for each in (mine, theirs))
    wrong = (mine != theirs).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {len(mine)} bytes differ, the first is {int(wrong[0])}"


def guarded(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> tuple[Tensor, Tensor]:
    """Memory (bytes), and a tensor in the middle of it, ``offset`` bytes behind its beginning."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.full((offset + size + _BEHIND,), _PATTERN, dtype=torch.uint8)
    return memory, memory[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True)
class _Written:
    """What a backend has written: a target, its amax, and the memory of each buffer with the dtype to compare it as."""

    target: Target | GroupedTarget
    memory: dict[str, tuple[Tensor, torch.dtype]]

    def assert_equals(self, expected: _Written) -> None:
        mine, theirs = self.target.amax, expected.target.amax
        assert (mine is None) == (theirs is None), "only one backend has measured an amax"
        if mine is not None and theirs is not None:
            assert_same(mine, theirs, "measured amax")
        for name, (bytes_, dtype) in self.memory.items():
            assert_same(bytes_.view(dtype), expected.memory[name][0].view(dtype), f"{name} of {_name(self.target)}")


def _name(target: Target | GroupedTarget) -> str:
    plane = target.plane if isinstance(target, Target) else target.planes
    return f"the {plane.direction.value} plane of {plane.format.name}"


def _placed(
    buffers: dict[str, Tensor | None], offset: int
) -> tuple[dict[str, Tensor | None], dict[str, tuple[Tensor, torch.dtype]]]:
    """Buffers like those given, each in memory of its own. fp32 numbers lie at multiples of four bytes."""
    new: dict[str, Tensor | None] = {}
    memory: dict[str, tuple[Tensor, torch.dtype]] = {}
    for name, buffer in buffers.items():
        if buffer is None:
            new[name] = None
            continue
        size = buffer.dtype.itemsize
        around, inside = guarded(tuple(buffer.shape), buffer.dtype, -(-offset // size) * size)
        new[name] = inside
        memory[name] = (around[: len(around) // size * size], buffer.dtype)
    return new, memory


def _guarded_plane(plane: Plane, case: Case) -> tuple[Plane, dict[str, tuple[Tensor, torch.dtype]]]:
    new, memory = _placed({"codes": plane.data, "scales": plane.scale, "amax": plane.amax}, case.offset)
    codes = new["codes"]
    assert codes is not None
    if case.blocked_columns and plane.direction is COLUMNWISE and not plane.transposed:
        codes = stored_by_columns(codes)
    return replace(plane, data=codes, scale=new["scales"], amax=new["amax"]), memory


def _written(backend: Backend, case: Case) -> list[_Written]:
    x = matrix(case.numbers, case.shape, case.dtype, case.layout)
    scale = None if case.scale is None else torch.tensor([case.scale])
    targets, memories = [], []
    for direction, encoding in case.encodings():
        plane, memory = _guarded_plane(empty_plane(encoding.format, direction, x.shape, device=_CPU), case)
        targets.append(Target(plane, encoding, None, scale, case.within))
        memories.append(memory)
    amaxes = backend.measure(x, targets)
    if case.amax is not None:
        amaxes = [None if amax is None else torch.full_like(amax, case.amax) for amax in amaxes]
    targets = [target.with_amax(amax) for target, amax in zip(targets, amaxes, strict=True)]
    stochastic = any(target.encoding.stochastic for target in targets)
    backend.encode(x, targets, case.seed if stochastic else None)
    return [_Written(target, memory) for target, memory in zip(targets, memories, strict=True)]


def _written_groups(backend: Backend, case: GroupCase) -> list[_Written]:
    x = matrix(case.numbers, (sum(case.heights), case.width), case.dtype, case.layout)
    scales = None if case.scales is None else torch.tensor(case.scales)
    targets, memories = [], []
    for direction, encoding in case.encodings():
        planes = empty_groups(encoding.format, direction, case.heights, case.width, device=_CPU)
        new, memory = _placed({"data": planes.data, "scale": planes.scale, "amax": planes.amax}, case.offset)
        planes = replace(planes, **new)  # type: ignore[arg-type]
        targets.append(GroupedTarget(planes, encoding, None, scales, case.within))
        memories.append(memory)
    needy = [target for target in targets if target.needs_amax and target.scale is None]
    amaxes = iter(backend.measure_groups(x, needy))
    targets = [target.with_amax(next(amaxes)) if target in needy else target for target in targets]
    seeds = [5 + 2**33 * group for group in range(len(case.heights))]
    stochastic = any(target.encoding.stochastic for target in targets)
    backend.encode_groups(x, targets, seeds if stochastic else None)
    return [_Written(target, memory) for target, memory in zip(targets, memories, strict=True)]
