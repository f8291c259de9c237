"""Marks of NaNs and infinities: cases, and their check against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from crossgrain.formats import DEFAULT_SIGN_MASK, Format, nvfp4_format
from crossgrain.formats.built_in import BUILT_IN
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Backend, GroupedTarget, Target
from crossgrain.kernels.marks import loses_nonfinite
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane, shape_problem
from crossgrain.planes.groups import empty_groups

FORMATS = {fmt.name: fmt for fmt in (*filter(loses_nonfinite, BUILT_IN), nvfp4_format(rotation=DEFAULT_SIGN_MASK))}
BAD = ("nothing", "nan", "inf", "-inf")
HEIGHTS = (64, 0, 32)
_CPU = torch.device("cpu")


def check_marks(backend: Backend, fmt: Format, bad: str) -> None:
    """Planes are marked as the reference marks them, with and without knowing that there is something to mark."""
    shape = (50, 37) if fmt.ragged else (32, 64)
    x = _matrix(shape, bad)
    for direction in (ROWWISE, COLUMNWISE):
        if shape_problem(fmt, direction, shape) is not None:
            continue
        for known in (True, False):
            written = []
            for each in (REFERENCE, backend):
                target = Target(empty_plane(fmt, direction, shape, device=_CPU), Encoding(fmt))
                target = target.with_amax(each.measure(x, [target])[0])
                seen = each.encode(x, [target], None)
                if isinstance(seen, Tensor):
                    assert bool(seen) == (bad != "nothing")
                before = _bytes(target.plane.buffers())
                each.mark(x, target.plane, seen if known else None)
                written.append(_bytes(target.plane.buffers()))
                if bad == "nothing":
                    assert written[-1] == before
            assert written[0] == written[1]


def check_marked_groups(backend: Backend, fmt: Format, bad: str) -> None:
    """The same for groups of rows, of which one has no rows."""
    x = _matrix((sum(HEIGHTS), 96), bad)
    for direction in (ROWWISE, COLUMNWISE):
        written = []
        for each in (REFERENCE, backend):
            planes = empty_groups(fmt, direction, HEIGHTS, 96, device=_CPU)
            target = GroupedTarget(planes, Encoding(fmt))
            target = target.with_amax(each.measure_groups(x, [target])[0])
            each.mark_groups(x, planes, each.encode_groups(x, [target], None))
            written.append(_bytes([planes.data, planes.scale]))
        assert written[0] == written[1]


def _matrix(shape: tuple[int, int], bad: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(torch.bfloat16)
    if bad != "nothing":
        x.view(-1)[torch.randperm(x.numel(), generator=generator)[:5]] = float(bad)
    return x


def _bytes(buffers: list[Tensor]) -> list[bytes]:
    return [buffer.contiguous().view(torch.uint8).numpy().tobytes() for buffer in buffers]
