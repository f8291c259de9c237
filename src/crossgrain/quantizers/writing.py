"""Write planes: measure the input, determine amaxes, encode. All quantizers make and rewrite planes with this module.

A plane belongs to one quantizer, which may have a given scale or amax, may reduce amaxes over ranks, and may record
them. Planes of several quantizers, as of the two directions of a hybrid, are written together, with one pass over the
input and one seed, as if one quantizer had made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..formats.encoding import Encoding
from ..kernels import Make, Seen, Target
from ..planes import COLUMNWISE, Direction, Plane, matrix_shape
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

    def empty(self, device: torch.device, scale: Tensor | None = None, *, zeroed: bool = True) -> Plane:
        """Allocate the plane.

        Args:
            device: where.
            scale: a scale buffer that it shares with another plane; None for a new one.
            zeroed: write zeros to a new scale buffer that has padding. Without, whoever writes the plane has to do it.
        """
        sizes = self.sizes
        # With strides, torch allocates in half of the time.
        data = torch.empty_strided(sizes.data, sizes.data_strides, dtype=torch.uint8, device=device)
        if sizes.cuts_rows and device.type != "cpu" and multiplies_mxfp8(device):
            data = stored_by_columns(data)
        if scale is None and sizes.pads and zeroed:
            scale = torch.zeros(sizes.scale, dtype=self.scale_dtype, device=device)
        elif scale is None:
            scale = torch.empty_strided(sizes.scale, sizes.scale_strides, dtype=self.scale_dtype, device=device)
        amax = None if sizes.amax is None else torch.empty_strided(sizes.amax, (1,), dtype=torch.float32, device=device)
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


_MOST_PAIRS = 16


class Layout:
    """The planes that quantizers make together of matrices of one shape.

    Args:
        wanted: for each quantizer its class and the specs of its planes.
        derives: the second plane is made of the decoded first one. Only plans of whole layers make it so.

    Attributes:
        specs: the specs of all planes.
        counts: how many of them belong to each quantizer.
        serves: the directions that each plane serves.
        stochastic: whether a plane is rounded stochastically.
        observes: whether a quantizer records amaxes.
        step_plans: how layers run whose input, or whose gradient, has this layout.
    """

    def __init__(self, wanted: Sequence[tuple[type[Quantizer], Sequence[PlaneSpec]]], *, derives: bool = False) -> None:
        self._wanted = wanted
        self._derives = derives
        self.specs = [spec for _, specs in wanted for spec in specs]
        self.counts = [len(specs) for _, specs in wanted]
        self._encodings = [spec.encoding for spec in self.specs]
        self.serves = [spec.serves for spec in self.specs]
        self.stochastic = any(spec.encoding.stochastic for spec in self.specs)
        self.observes = any(quantizer._observes for quantizer, _ in wanted)
        self._shares_scale = [  # with the plane before
            at > 0 and quantizer._tensor_class._shares_scale for quantizer, specs in wanted for at in range(len(specs))
        ]
        self._plans: kernels.Plans = {}
        self._pairs: dict[tuple[int, bool], tuple[Layout, Layout]] = {}
        self.step_plans: kernels.StepPlans = {}

    def beside(self, other: Layout, *, derives: bool = False) -> Layout:
        """The layout of the planes of both, which are made together; or those of ``other`` of the decoded first one."""
        key = id(other), derives
        found = self._pairs.get(key)
        if found is None:
            if len(self._pairs) >= _MOST_PAIRS:
                self._pairs.clear()
            found = self._pairs[key] = other, Layout([*self._wanted, *other._wanted], derives=derives)
        return found[1]

    def for_step(self, matrix: Tensor, kept: Sequence[bool], scale: Tensor | None) -> Make:
        """What a plan of a layer has to make of matrices like ``matrix``: a plane for each direction.

        Args:
            matrix: an example.
            kept: whether each plane has tensors.
            scale: an example of a scale that the quantizer gives; None if it gives none.
        """
        planes, encodings = self.empty(matrix.device), self._encodings
        if len(planes) == 1:  # one buffer serves both
            planes, encodings = [planes[0], planes[0].read(COLUMNWISE)], encodings * 2
        return Make(matrix, planes, encodings, kept, self._derives, scale)

    def empty_columnwise(self, device: torch.device) -> Plane:
        """Allocate the columnwise plane, for a plan of a layer, which also writes zeros to its padding."""
        plane = self.specs[-1].empty(device, zeroed=False)
        return plane if plane.direction is COLUMNWISE else plane.read(COLUMNWISE)

    def empty(self, device: torch.device) -> list[Plane]:
        """Allocate the planes."""
        planes: list[Plane] = []
        for spec, shares in zip(self.specs, self._shares_scale, strict=True):
            planes.append(spec.empty(device, planes[-1].scale if shares else None))
        return planes

    def write_by_plan(self, matrix: Tensor, planes: list[Plane], quantizers: Sequence[Quantizer]) -> bool:
        """Measure and encode with one call of a kernel. False if that is not possible; then nothing is done."""
        for quantizer in quantizers:
            if quantizer.with_amax_reduction or quantizer.part is not None or quantizer.gives_scales:
                return False
        plan = kernels.plan(matrix, planes, self._encodings, self._plans)
        if plan is None:
            return False
        seed = draw_seed(quantizers[0].subject) if self.stochastic else None
        amaxes: list[Tensor] | None = [] if self.observes else None
        seen: Seen = plan.run(matrix, planes, seed, amaxes)
        amax, written = amaxes[0] if amaxes else None, None
        if self.observes or seen is None:
            written = [Target(plane, encoding, amax) for plane, encoding in zip(planes, self._encodings, strict=True)]
        if seen is None:  # these numbers need another way, with the same seed
            written = kernels.measure(matrix, [target.with_amax(None) for target in written or ()], checked=True)
            seen = kernels.encode(matrix, written, seed, checked=True)
        if self.observes or seen is not False:
            self._tell(matrix, planes, quantizers, written, seen)
        return True

    def _tell(
        self,
        matrix: Tensor,
        planes: list[Plane],
        quantizers: Sequence[Quantizer],
        written: Sequence[Target] | None,
        seen: Seen,
    ) -> None:
        """Show amaxes to quantizers that record them, and act on NaNs and infinities."""
        ends = list(accumulate(self.counts))
        shares = [
            (quantizer, slice(end - n, end)) for quantizer, end, n in zip(quantizers, ends, self.counts, strict=True)
        ]
        for quantizer, own in shares:
            if quantizer._observes and written is not None:
                quantizer._observe(written[own])
        if seen is not False:
            act_on_nonfinite(matrix, [(quantizer, planes[own]) for quantizer, own in shares], seen)


class Job(NamedTuple):
    """The planes that are written for one quantizer."""

    quantizer: Quantizer
    planes: Sequence[Plane]


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix [M, K], detached from autograd."""
    matrix = tensor.detach()
    return matrix if matrix.dim() == 2 else matrix.reshape(matrix_shape(matrix.shape))


def make_planes(matrix: Tensor, layout: Layout, quantizers: Sequence[Quantizer]) -> list[Plane]:
    """Make new planes of a matrix.

    Args:
        matrix: the matrix [M, K], detached from autograd.
        layout: the planes to make.
        quantizers: the quantizers for which the layout was made, or copies of them.

    Returns:
        The planes, in the order of the layout.
    """
    planes = layout.empty(matrix.device)
    if not observer.observers and layout.write_by_plan(matrix, planes, quantizers):
        return planes
    left, targets = iter(zip(planes, layout.specs, strict=True)), []
    for quantizer, count in zip(quantizers, layout.counts, strict=True):
        amax, scale = quantizer._given()
        for plane, spec in islice(left, count):
            targets.append(Target(plane, spec.encoding, amax, scale))
    written, seed = _write(matrix, targets, list(zip(quantizers, layout.counts, strict=True)))
    if observer.observers:
        observer.tell(quantizers[0].subject, matrix, list(zip(written, layout.serves, strict=True)), seed)
    return planes


def write_planes(src: Tensor, jobs: Sequence[Job]) -> None:
    """Write a matrix to existing planes.

    Args:
        src: the matrix [M, K], detached from autograd.
        jobs: the planes, in the formats of their quantizers.
    """
    targets: list[Target] = []
    for quantizer, planes in jobs:
        targets += quantizer._targets(planes)
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
