"""Write a part of a plane without knowing the rest of the matrix.

A code depends on its number and on the scales. A scale depends on the amax of its block, which may be on another rank.
So amaxes are measured first (`part_amaxes`, with zeros for numbers that are not known), the largest over all ranks are
taken, and then each rank encodes its own part. With rotations and 4-over-6 a code also depends on the other numbers of
its block. This module is plain torch, for every device.
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
    """Whether a code depends on other numbers of its block, not only on its number and on amaxes."""
    return encoding.format.rotation is not None or encoding.four_over_six is not None


def part_amaxes(x: Tensor, target: Target) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes from which scales are computed: the global one (None if it is not needed), and those of blocks."""
    fmt = target.encoding.format
    overall = measure(x, target) if target.amax is None and target.needs_amax else target.amax
    return overall, None if fmt.block is None else block_amax(operand_of(x, target.plane), fmt.block)


def write_part(
    x: Tensor, target: Target, block_max: Tensor | None, spans: Sequence[Span], seed: int | None, out: Tensor | None
) -> None:
    """Write all scales, and some codes, to the plane of a target.

    Args:
        x: the matrix [M, K]. If the amaxes are given, only the numbers of ``spans`` are used.
        target: the plane, its encoding and the global amax.
        block_max: the amaxes of blocks; None to measure them.
        spans: the codes to write, as ranges of the flattened matrix.
        seed: seed of stochastic rounding.
        out: write the codes to this tensor instead.
    """
    plane, fmt = target.plane, target.encoding.format
    if fmt.is_identity:
        if not spans:
            return
        merged = plane.data.reshape(-1)
        _write_spans(x.reshape(-1), merged, spans, out)
        if not plane.data.is_contiguous():  # reshape has made a copy
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
    """Convert an operand to the matrix [M, K], or the matrix to the operand."""
    return operand if plane.direction is ROWWISE else operand.t()


def _write_spans(new: Tensor, old: Tensor, spans: Sequence[Span], out: Tensor | None) -> None:
    for start, end in spans:
        (old[start:end] if out is None else out.view(-1)).copy_(new[start:end])
