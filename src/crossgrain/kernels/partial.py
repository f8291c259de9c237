"""Writing part of a plane, by someone who does not know the rest of the matrix.

A code follows from its own number and the scales; a scale follows from the largest magnitude of its block,
which may lie elsewhere. So amaxes are found first (`part_amaxes`, zeros for what is unknown), maximised over
all who know a part, and then each encodes its own with the result. Only rotations and 4-over-6 look at
neighbours themselves. In plain torch, for every device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import ROWWISE, Plane
from .reference.blocks import block_amax
from .reference.encode import encoded, measure, operand_of, write_scales
from .reference.packing import pack, unpack
from .target import Target

Span = tuple[int, int]  # start and end in the flattened matrix


def needs_neighbours(encoding: Encoding) -> bool:
    """Whether a code depends on more than its own number and amaxes."""
    return encoding.format.rotation is not None or encoding.four_over_six is not None


def part_amaxes(x: Tensor, target: Target) -> tuple[Tensor | None, Tensor | None]:
    """What scales follow from: the global amax, unless it is given or none is needed, and those of the blocks."""
    fmt = target.encoding.format
    overall = measure(x, target) if target.amax is None and target.needs_amax else target.amax
    return overall, None if fmt.block is None else block_amax(operand_of(x, target.plane), fmt.block)


def write_part(
    x: Tensor, target: Target, block_max: Tensor | None, spans: Sequence[Span], seed: int | None, out: Tensor | None
) -> None:
    """Write the scales, and the codes of ``spans`` if any, to ``target.plane``; the codes to ``out`` instead, if given.

    ``x`` is the matrix [M, K], of which only ``spans`` has to be right if the amaxes are given.
    """
    plane, fmt = target.plane, target.encoding.format
    if fmt.is_identity:
        if not spans:
            return
        merged = plane.data.reshape(-1)
        _write_spans(x.reshape(-1), merged, spans, out)
        if not plane.data.is_contiguous():  # then it was a copy
            plane.data.copy_(merged.view(plane.data.shape))
        return
    assert fmt.element is not None
    codes, stored = encoded(x, target, seed, block_max)
    new = _logical(codes, plane).reshape(-1)
    if out is not None:
        _write_spans(new, new, spans, out)
    elif spans:
        merged = _logical(unpack(plane.operand_codes(), fmt.element.bits), plane).reshape(-1).clone()
        _write_spans(new, merged, spans, None)
        plane.operand_codes().copy_(pack(_logical(merged.view(plane.shape), plane).contiguous(), fmt.element.bits))
    write_scales(stored, target)


def _logical(operand: Tensor, plane: Plane) -> Tensor:
    """An operand as the matrix [M, K], or the other way round."""
    return operand if plane.direction is ROWWISE else operand.t()


def _write_spans(new: Tensor, old: Tensor, spans: Sequence[Span], out: Tensor | None) -> None:
    for start, end in spans:
        (old[start:end] if out is None else out.view(-1)).copy_(new[start:end])
