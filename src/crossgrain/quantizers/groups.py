"""Quantize groups of rows, each with its own quantizer, in one call of the kernels.

One call measures the amaxes of all groups, which are reduced and recorded together, and one more call encodes. The
bytes, the statistics and the random seeds are the same as for quantizing one group after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import GroupedTarget, Seen
from ..kernels.marks import mark_nonfinite_in_groups
from ..planes import Direction
from ..planes.groups import PlaneGroups, empty_groups
from ..runtime.random_numbers import draw_seed
from ..tensor import QuantizedTensorStorage
from . import observer
from .base import Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .nonfinite import act_on_nonfinite, naming_places_in, policy_of
from .parts import agree, placed


class _Share(NamedTuple):
    """The planes of all groups that the quantizers of one tensor, or of one direction of hybrids, make."""

    quantizers: Sequence[Quantizer]
    planes: list[PlaneGroups]


def can_quantize_groups(quantizers: Sequence[Quantizer]) -> bool:
    """Whether `quantize_groups` works: no custom quantizers, one reduction group, no planes made from decoded ones."""
    first = quantizers[0]
    if isinstance(first, HybridQuantizer):
        if first.derives_columns:
            return False
        hybrids: Sequence[Any] = quantizers
        return all(_are_alike([hybrid.child(direction) for hybrid in hybrids]) for direction in Direction)
    return _are_alike(quantizers) and not isinstance(first, IdentityQuantizer)


def _are_alike(quantizers: Sequence[Quantizer]) -> bool:
    group = quantizers[0].amax_reduction_group
    return not quantizers[0].custom and all(quantizer.amax_reduction_group is group for quantizer in quantizers)


def quantize_groups(
    rows: Tensor, sizes: Sequence[int], quantizers: Sequence[Quantizer]
) -> list[QuantizedTensorStorage]:
    """Quantize rows in groups.

    Args:
        rows: a matrix [sum of sizes, K].
        sizes: number of rows of each group.
        quantizers: one quantizer for each group, all with the same configuration.

    Returns:
        One storage for each group.
    """
    for size in sorted(set(sizes)):
        _check(rows[:size], quantizers[0])
    with torch.no_grad():
        rows = rows.detach()
        first: Any = quantizers[0]
        if isinstance(first, HybridQuantizer):
            return _hybrids(rows, sizes, quantizers, first._wanted())
        share = _allocated(rows, sizes, quantizers)
        _write(rows, [share])
        return _storages(rows, share)


def _check(group: Tensor, quantizer: Quantizer) -> None:
    if isinstance(quantizer, HybridQuantizer):
        quantizer._checked_by_children(group, quantizer._wanted())
    else:
        quantizer._checked(group, quantizer._directions_to_make())


def _hybrids(
    rows: Tensor, sizes: Sequence[int], hybrids: Sequence[Any], wanted: Sequence[Direction]
) -> list[QuantizedTensorStorage]:
    """The same for hybrid quantizers: one call writes both children."""
    shares, children = {}, {}
    for direction in wanted:
        quantizers = [hybrid._made_child(direction) for hybrid in hybrids]
        if isinstance(quantizers[0], IdentityQuantizer):
            groups = zip(quantizers, torch.split(rows, list(sizes)), strict=True)
            children[direction] = [quantizer.quantize_impl(group) for quantizer, group in groups]
        else:
            shares[direction] = _allocated(rows, sizes, quantizers)
    _write(rows, list(shares.values()))
    children |= {direction: _storages(rows, share) for direction, share in shares.items()}
    made = []
    for g, (hybrid, group) in enumerate(zip(hybrids, rows.split(list(sizes)), strict=True)):
        own = {direction: children[direction][g] for direction in wanted}
        hybrid._draw_for_what_is_left_out(wanted)
        hybrid._show_to_what_is_left_out(group, wanted)
        made.append(hybrid._wrap(own, group.shape, rows.dtype, rows.device))
    return made


def _allocated(rows: Tensor, sizes: Sequence[int], quantizers: Sequence[Quantizer]) -> _Share:
    width, planes = rows.shape[1], []
    shared_scale = None
    first = quantizers[0]
    for spec in first._layout_for((sizes[0], width), first.rowwise_usage, first.columnwise_usage).specs:
        options: Any = {"device": rows.device, "transposed": spec.transposed, "scale": shared_scale}
        planes.append(empty_groups(spec.encoding.format, spec.direction, sizes, width, **options))
        if first._tensor_class._shares_scale:
            shared_scale = planes[-1].scale
    return _Share(quantizers, planes)


def _write(rows: Tensor, shares: Sequence[_Share]) -> None:
    if not shares:
        return
    asked = [_targets(share) for share in shares]
    ready = kernels.measure_groups(rows, [target for targets in asked for target in targets])
    stochastic = any(target.encoding.stochastic for target in ready)
    drawn = [draw_seed(quantizer.subject) for quantizer in shares[0].quantizers] if stochastic else []
    counts = [(share.quantizers[0], len(targets)) for share, targets in zip(shares, asked, strict=True)]
    ready, seeds = agree(ready, counts, drawn)
    rest = iter(ready)
    for share, targets in zip(shares, asked, strict=True):
        type(share.quantizers[0])._observe_all(share.quantizers, [next(rest) for _ in targets])
    # Ranks divide the columns of groups, never their rows, so it does not matter how many rows each group has.
    ready = placed(ready, counts, 0, rows.shape[1])
    seen = kernels.encode_groups(rows, ready, seeds or None)
    if seen is not False:
        _act_on_nonfinite(rows, shares, seen)
    if observer.observers:
        _tell(rows, shares, ready, seeds)


def _tell(rows: Tensor, shares: Sequence[_Share], targets: Sequence[GroupedTarget], seeds: Sequence[int]) -> None:
    """Show observers the planes, group by group."""
    heights = shares[0].planes[0].heights
    by_group = zip(*(target.by_group() for target in targets), strict=True)
    for g, (group, own) in enumerate(zip(rows.split(list(heights)), by_group, strict=True)):
        serves = [
            each
            for share in shares
            for each in share.quantizers[g].directions_served([groups.planes[g] for groups in share.planes])
        ]
        seed = seeds[g] if seeds else None
        observer.tell(shares[0].quantizers[g].subject, group, list(zip(own, serves, strict=True)), seed)


def _act_on_nonfinite(rows: Tensor, shares: Sequence[_Share], seen: Seen) -> None:
    """Do what the policies say, group by group; on a GPU all groups at once, if all policies are the same."""
    policies = {policy_of(each) for share in shares for each in share.quantizers}
    if not isinstance(seen, bool) and policies == {"propagate"}:
        for share in shares:
            for groups in share.planes:
                mark_nonfinite_in_groups(rows, groups, seen)
        return
    first = 0
    for g, height in enumerate(shares[0].planes[0].heights):
        written = [(share.quantizers[g], [groups.planes[g] for groups in share.planes]) for share in shares]
        group = rows[first : first + height]
        finite = seen is True and bool(group.isfinite().all())
        if not finite:
            with naming_places_in(rows):
                act_on_nonfinite(group, written, seen)
        first += height


def _targets(share: _Share) -> list[GroupedTarget]:
    amax, scale = map(_one_of_each, zip(*(quantizer._given() for quantizer in share.quantizers), strict=True))
    first = share.quantizers[0]
    return [GroupedTarget(planes, first.encoding(planes.direction), amax, scale) for planes in share.planes]


def _one_of_each(given: Sequence[Tensor | None]) -> Tensor | None:
    present = [number.view(1) for number in given if number is not None]
    return torch.cat(present) if present else None


def _storages(rows: Tensor, share: _Share) -> list[QuantizedTensorStorage]:
    width = rows.shape[1]
    by_direction = [groups.planes for groups in share.planes]
    made = []
    for quantizer, *planes in zip(share.quantizers, *by_direction, strict=True):
        storage = quantizer._blank((planes[0].shape[0], width), rows.dtype, rows.device)
        for plane in planes:
            storage._set_plane(plane.direction, plane)
        storage._quantizer.leave_group()
        made.append(storage)
    return made
