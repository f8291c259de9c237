"""Write planes: measure the input, determine amaxes, encode. All quantizers make and rewrite planes with this module.

A plane belongs to one quantizer, which may have a given scale or amax, may reduce amaxes over ranks, and may record
them. Planes of several quantizers, as of the two directions of a hybrid, are written together, with one pass over the
input and one seed, as if one quantizer had made them.
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
from ..planes.plane import BufferShapes, buffer_shapes, scale_dtype, stored_by_columns
from ..runtime.gpu_capability import multiplies_mxfp8
from ..runtime.random_numbers import draw_seed
from . import observer
from .nonfinite import act_on_nonfinite
from .parts import agree, encode_parts

if TYPE_CHECKING:
    from .base import Quantizer


class PlaneSpec(NamedTuple):
    """Everything about a plane for matrices of one shape, except its memory."""

    encoding: Encoding
    direction: Direction
    transposed: bool
    sizes: BufferShapes
    scale_dtype: torch.dtype
    serves: tuple[Direction, ...]  # the directions in which GEMMs read it

    def empty(self, device: torch.device, scale: Tensor | None = None) -> Plane:
        """Allocate the plane. ``scale`` is a scale buffer that it shares with another plane; None for a new one."""
        sizes = self.sizes
        data = torch.empty(sizes.data, dtype=torch.uint8, device=device)
        if sizes.cuts_rows and device.type != "cpu" and multiplies_mxfp8(device):
            data = stored_by_columns(data)
        if scale is None:
            fill = torch.zeros if sizes.pads else torch.empty
            scale = fill(sizes.scale, dtype=self.scale_dtype, device=device)
        amax = None if sizes.amax is None else torch.empty(sizes.amax, dtype=torch.float32, device=device)
        return Plane(self.encoding.format, self.direction, sizes.matrix, data, scale, amax, self.transposed)


def plane_spec(
    encoding: Encoding,
    direction: Direction,
    transposed: bool,
    shape: tuple[int, ...],
    serves: tuple[Direction, ...] | None = None,
) -> PlaneSpec:
    """Make the spec of a plane for matrices of one shape. It serves its own direction, unless said otherwise."""
    fmt = encoding.format
    sizes = buffer_shapes(fmt, direction, shape, transposed)
    return PlaneSpec(encoding, direction, transposed, sizes, scale_dtype(fmt), serves or (direction,))


class Job(NamedTuple):
    """The planes that are written for one quantizer."""

    quantizer: Quantizer
    planes: Sequence[Plane]


def make_planes(matrix: Tensor, wanted: Sequence[tuple[Quantizer, Sequence[PlaneSpec]]]) -> list[Plane]:
    """Make new planes of a matrix.

    Args:
        matrix: the matrix [M, K], detached from autograd.
        wanted: for each quantizer, the specs of its planes.

    Returns:
        The planes, in the order of the specs.
    """
    device = matrix.device
    targets: list[Target] = []
    for quantizer, specs in wanted:
        amax, factor = quantizer._given()
        scale = None
        for spec in specs:
            plane = spec.empty(device, scale)
            if quantizer._tensor_class._shares_scale:
                scale = plane.scale
            targets.append(Target(plane, spec.encoding, amax, factor))
    written, seed = _write(matrix, targets, [(quantizer, len(specs)) for quantizer, specs in wanted])
    if observer.observers:
        serves = [spec.serves for _, specs in wanted for spec in specs]
        observer.tell(wanted[0][0].subject, matrix, list(zip(written, serves, strict=True)), seed)
    return [target.plane for target in targets]


def write_planes(src: Tensor, jobs: Sequence[Job], *, checked: bool = False) -> None:
    """Write a matrix to existing planes.

    Args:
        src: the matrix [M, K], detached from autograd.
        jobs: the planes, in the formats of their quantizers.
        checked: the planes were just made for ``src`` and need no checks.
    """
    targets: list[Target] = []
    for quantizer, planes in jobs:
        targets += quantizer._targets(planes)
    if not checked:
        kernels.check_targets(src, targets)
    written, seed = _write(src, targets, [(quantizer, len(planes)) for quantizer, planes in jobs])
    if observer.observers:
        serves = [each for quantizer, planes in jobs for each in quantizer.directions_served(planes)]
        observer.tell(jobs[0].quantizer.subject, src, list(zip(written, serves, strict=True)), seed)


def _write(
    src: Tensor, targets: list[Target], shares: Sequence[tuple[Quantizer, int]]
) -> tuple[list[Target], int | None]:
    """Measure and encode. ``shares`` says how many of the targets belong to each quantizer.

    Returns:
        The targets with their amaxes, and the seed of stochastic rounding.
    """
    stochastic = measures = common = observed = False
    for target in targets:
        stochastic = stochastic or target.encoding.stochastic
        measures = measures or target.encoding.needs_amax
    for quantizer, _ in shares:
        common = common or quantizer.with_amax_reduction or quantizer.part is not None
        observed = observed or quantizer._observes
    if measures:
        targets = kernels.measure(src, targets, checked=True)
    seed = draw_seed(shares[0][0].subject) if stochastic else None
    if common:
        targets, seeds = agree(targets, shares, [] if seed is None else [seed])
        seed = seeds[0] if seeds else None
    if observed and measures:
        rest = iter(targets)
        for quantizer, count in shares:
            quantizer._observe([next(rest) for _ in range(count)])
    if common and seed is not None:
        seen = encode_parts(src, targets, shares, seed)
    else:
        seen = kernels.encode(src, targets, seed, checked=True)
    if seen is not False:
        planes = iter([target.plane for target in targets])
        act_on_nonfinite(src, [(quantizer, [next(planes) for _ in range(n)]) for quantizer, n in shares], seen)
    return targets, seed
