"""Writing planes: measure the input, settle amaxes, encode. All quantizers make and refill planes through here.

A plane is written for one quantizer, which may have a scale or an amax of its own, reduces amaxes over ranks and notes
what it has seen. Planes of several quantizers, as of the two directions of a hybrid, are written together: one pass
over the input, and one seed, as if one quantizer had made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..formats.encoding import Encoding
from ..kernels import Target
from ..planes import Direction, Plane
from ..planes.plane import BufferShapes, buffer_shapes, scale_dtype
from ..runtime.random_numbers import draw_seed

if TYPE_CHECKING:
    from .base import Quantizer


class PlaneSpec(NamedTuple):
    """All of a plane that is to be made but its memory, for matrices of one shape."""

    encoding: Encoding
    direction: Direction
    transposed: bool
    sizes: BufferShapes
    scale_dtype: torch.dtype

    def empty(self, device: torch.device, scale: Tensor | None = None) -> Plane:
        """The plane with memory of its own, but for a ``scale`` that it shares with another."""
        sizes = self.sizes
        data = torch.empty(sizes.data, dtype=torch.uint8, device=device)
        if scale is None:
            fill = torch.zeros if sizes.pads else torch.empty
            scale = fill(sizes.scale, dtype=self.scale_dtype, device=device)
        amax = None if sizes.amax is None else torch.empty(sizes.amax, dtype=torch.float32, device=device)
        return Plane(self.encoding.format, self.direction, sizes.matrix, data, scale, amax, self.transposed)


def plane_spec(encoding: Encoding, direction: Direction, transposed: bool, shape: tuple[int, ...]) -> PlaneSpec:
    fmt = encoding.format
    return PlaneSpec(
        encoding, direction, transposed, buffer_shapes(fmt, direction, shape, transposed), scale_dtype(fmt)
    )


class Job(NamedTuple):
    """One quantizer's share of a write."""

    quantizer: Quantizer
    planes: Sequence[Plane]


def make_planes(matrix: Tensor, wanted: Sequence[tuple[Quantizer, Sequence[PlaneSpec]]]) -> list[Plane]:
    """New planes of ``matrix`` [M, K], as the specs of each quantizer say, in their order."""
    device, jobs = matrix.device, []
    for quantizer, specs in wanted:
        planes = [specs[0].empty(device)]
        for spec in specs[1:]:
            planes.append(spec.empty(device, planes[0].scale if quantizer._tensor_class._shares_scale else None))
        jobs.append(Job(quantizer, planes))
    write_planes(matrix, jobs, checked=True)
    return [plane for job in jobs for plane in job.planes]


def write_planes(src: Tensor, jobs: Sequence[Job], *, checked: bool = False) -> None:
    """Write ``src`` [M, K], which has no history in autograd, to planes in the formats of their quantizers.

    ``checked``: the planes were just made for ``src``.
    """
    targets: list[Target] = []
    for quantizer, planes in jobs:
        targets += quantizer._targets(planes)
    targets = kernels.measure(src, targets, checked=checked)
    start = 0
    for quantizer, planes in jobs:
        stop = start + len(planes)
        if quantizer._settles:
            targets[start:stop] = quantizer._settled(targets[start:stop])
        start = stop
    stochastic = any(target.encoding.stochastic for target in targets)
    kernels.encode(src, targets, draw_seed() if stochastic else None, checked=True)
