"""Parts of tensors that ranks quantize as the whole tensor: amaxes and seeds that they agree on, and positions.

Both travel in one collective. Each rank draws a seed from its own generator, as a single process would do, and all use
that of the first rank of the group. Random numbers are counted by positions in the whole tensor, so the parts are
rounded as in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..kernels import GroupedTarget, Seen, Target, Within
from ..planes import ROWWISE, Plane, empty_plane
from ..planes.slicing import slice_plane
from ..runtime.collectives import collective_device, group_rank, group_size, maximise_
from ..runtime.host_and_device import on_device

if TYPE_CHECKING:
    from .base import Quantizer

AnyTarget = TypeVar("AnyTarget", Target, GroupedTarget)
Shares = Sequence[tuple["Quantizer", int]]  # how many of the targets, one after the other, belong to each quantizer


class Part(NamedTuple):
    """What this rank has of a tensor.

    Attributes:
        group: the process group of the ranks that have the parts.
        axis: the axis along which the tensor was divided evenly (0: rows, 1: columns); None if each rank has all of it.
        segments: if the tensor consists of several pieces along ``axis``, each of which was divided, the sizes of this
            rank's share of each.
    """

    group: Any
    axis: int | None
    segments: tuple[int, ...] = ()

    def within(self, rows: int, columns: int) -> Within | None:
        """Where the part, a matrix of this size, lies in the whole. Segments are not considered."""
        if self.axis is None:
            return None
        rank = group_rank(self.group)
        if self.axis == 0:
            return Within(rank * rows, 0, columns)
        return Within(0, rank * columns, group_size(self.group) * columns)


def agree(targets: Sequence[AnyTarget], shares: Shares, seeds: Sequence[int]) -> tuple[list[AnyTarget], list[int]]:
    """Agree on amaxes and seeds with the other ranks that have parts of a tensor.

    Args:
        targets: measured targets.
        shares: whose targets they are.
        seeds: the seeds that this rank has drawn.

    Returns:
        Targets with the largest amaxes over the ranks, and the seeds of the first rank. There is one collective for
        each process group, or none if there is nothing to agree on.
    """
    ready, start = list(targets), 0
    sharing: dict[Any, list[int]] = {}  # for each group, the targets whose amaxes it shares
    for quantizer, count in shares:
        for at in range(start, start + count) if quantizer.with_amax_reduction else ():
            if ready[at].amax is not None and quantizer._shares_amax(ready[at]):
                sharing.setdefault(quantizer.amax_reduction_group, []).append(at)
        start += count
    seeded = next((quantizer.part for quantizer, _ in shares if quantizer.part is not None), None) if seeds else None
    if seeded is not None:
        sharing.setdefault(seeded.group, [])
    for group, places in sharing.items():
        amaxes: list[Tensor] = [amax for at in places if (amax := ready[at].amax) is not None]
        riding = seeded is not None and group is seeded.group
        words: list[Tensor] = (
            [_words(seeds, group, amaxes[0].device if amaxes else _device_of(group))] if riding else []
        )
        packed = torch.cat([*amaxes, *words])
        maximise_(packed, group)
        pieces = iter(packed.split([amax.numel() for amax in amaxes] + [len(word) for word in words]))
        for at in places:
            ready[at] = ready[at].with_amax(next(pieces))
        seeds = _seeds(next(pieces)) if riding else seeds
    return ready, list(seeds)


def agreed_seed(seed: int, group: Any) -> int:
    """The seed of the first rank of ``group``, which may be a tuple of groups."""
    words = _words([seed], group, _device_of(group))
    maximise_(words, group)
    return _seeds(words)[0]


def _words(seeds: Sequence[int], group: Any, device: torch.device) -> Tensor:
    """Seeds as float32 numbers of 16 bits each; zeros on all ranks but the first, so that the largest are its own."""
    is_first = all(group_rank(each) == 0 for each in (group if isinstance(group, tuple) else (group,)))
    words = [float((seed >> shift) & 0xFFFF) if is_first else 0.0 for seed in seeds for shift in (0, 16, 32, 48)]
    return on_device(words, device, torch.float32)


def _device_of(group: Any) -> torch.device:
    """The device of numbers that all members of ``group``, which may be a tuple of groups, can communicate."""
    return collective_device(group[0] if isinstance(group, tuple) else group)


def _seeds(words: Tensor) -> list[int]:
    return [sum(int(word) << 16 * at for at, word in enumerate(four)) for four in words.view(-1, 4).tolist()]


# ---- positions -------------------------------------------------------------------------------------------


def placed(targets: Sequence[AnyTarget], shares: Shares, rows: int, columns: int) -> list[AnyTarget]:
    """Targets that round stochastically, with their position in the whole tensor. Segments are not considered."""
    ready, start = list(targets), 0
    for quantizer, count in shares:
        within = None if quantizer.part is None else quantizer.part.within(rows, columns)
        for at in range(start, start + count) if within is not None else ():
            if ready[at].encoding.stochastic:
                ready[at] = replace(ready[at], within=within)
        start += count
    return ready


def encode_parts(src: Tensor, targets: Sequence[Target], shares: Shares, seed: int) -> Seen:
    """`kernels.encode` for parts: random numbers are those of the whole tensor."""
    rows, columns = src.shape
    part = next((quantizer.part for quantizer, _ in shares if quantizer.part is not None), None)
    rounded = [target for target in targets if target.encoding.stochastic]
    pieces = [] if part is None else _pieces(part, rounded, (rows, columns))
    if len(pieces) < 2:
        return kernels.encode(src, placed(targets, shares, rows, columns), seed, checked=True)
    assert part is not None and part.axis is not None
    rest = [target for target in targets if not target.encoding.stochastic]
    seen = [kernels.encode(src, rest, None, checked=True)] if rest else []
    for start, stop, within in pieces:
        piece = src.narrow(part.axis, start, stop - start)
        own = [_target_of_piece(target, piece, within) for target in rounded]
        seen.append(kernels.encode(piece, own, seed, checked=True))
        for target, one in zip(rounded, own, strict=True):
            _copy(one.plane, slice_plane(target.plane, target.plane.shape, part.axis, start, stop))
    known = [each for each in seen if isinstance(each, bool)]
    return any(known) if len(known) == len(seen) else None


def _pieces(part: Part, targets: Sequence[Target], shape: tuple[int, int]) -> list[tuple[int, int, Within]]:
    """Start, stop and position of each segment; nothing if a segment ends inside a block, which is then cut anyway.

    Padding belongs to the last segment.
    """
    if part.axis is None or len(part.segments) < 2:
        return []
    ends = [*list(accumulate(part.segments))[:-1], shape[part.axis]]
    if any(end % _block_along(target, part.axis) for target in targets for end in ends[:-1]):
        return []
    rank, ranks = group_rank(part.group), group_size(part.group)
    width = shape[1] if part.axis == 0 else ranks * shape[1]
    found = []
    for start, stop in pairwise([0, *ends]):
        first = ranks * start + rank * (stop - start)
        found.append((start, stop, Within(first, 0, width) if part.axis == 0 else Within(0, first, width)))
    return found


def _block_along(target: Target, axis: int) -> int:
    fmt = target.encoding.format
    return fmt.block_length if (axis == 1) == (target.plane.direction is ROWWISE) else fmt.block_rows


def _target_of_piece(target: Target, piece: Tensor, within: Within) -> Target:
    plane = target.plane
    own = empty_plane(plane.format, plane.direction, piece.shape, device=piece.device, transposed=plane.transposed)
    return replace(target, plane=own, within=within)


def _copy(plane: Plane, to: Plane) -> None:
    to.operand_codes().copy_(plane.operand_codes())
    to.operand_scales().copy_(plane.operand_scales())
    if to.amax is not None and plane.amax is not None:
        to.amax.copy_(plane.amax)
