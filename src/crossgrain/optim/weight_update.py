"""`quantize_master_weights`: update quantized weights when each rank has only a piece of each master.

A distributed optimizer cuts the flattened masters of all weights into pieces, one per rank. A cut may go through a row,
a block or a byte. Each rank writes the codes of its own pieces into its copy of the quantized weight, with scales that
are computed from the whole weight. Then the codes are gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..kernels.partial import Span, needs_neighbours, part_amaxes, write_part
from ..kernels.target import Target
from ..planes import COLUMNWISE, ROWWISE
from ..quantizers import observer
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..quantizers.hybrid_tensor import HybridQuantizedTensorStorage
from ..quantizers.parts import agreed_seed, placed
from ..runtime.collectives import joined_groups, maximised, without_group
from ..runtime.random_numbers import draw_seed
from ..runtime.settings import settings
from ..runtime.strict import refuse_if_strict
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.init_values import clear_preserved_value
from ..tensor.sharding import exchanged
from .gathered_codes import (
    columns_made_from_rows,
    is_written_whole,
    leave_for_processing,
    make_columns_from_rows,
    note_place,
    post_all_gather_processing,
    replace_raw_data,
)

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]

Shard = Tensor | Sequence[Tensor | None] | None


@dataclass
class _Weight:
    """A weight, and the pieces of its master that this rank has."""

    weight: QuantizedTensor
    spans: list[Span] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    shard: Shard = None

    def matrix(self) -> Tensor:
        """The master [M, K] in the weight's dtype, zero where this rank does not have it."""
        weight = self.weight
        flat = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
        for (start, end), piece in zip(self.spans, self.pieces, strict=True):
            flat[start:end] = piece
        return flat.view(weight._matrix)

    def is_complete(self) -> bool:
        """Whether the pieces cover the whole weight."""
        covered = 0
        for start, end in sorted(self.spans):
            if start > covered:
                return False
            covered = max(covered, end)
        return covered >= self.weight.numel() and self.shard is None

    def holders(self) -> list[tuple[Quantizer, QuantizedTensorStorage]]:
        """The tensors that are written from the master itself, with their quantizers.

        Columns that are made from the rows are not included.
        """
        weight: QuantizedTensorStorage = self.weight
        quantizer: Any = weight._get_quantizer()
        if not isinstance(weight, HybridQuantizedTensorStorage):
            return [(quantizer, weight)]
        assert isinstance(quantizer, HybridQuantizer)
        children = weight._children()
        return [
            (quantizer._quantizer_of(direction), child)
            for direction, child in children.items()
            if not (direction is COLUMNWISE and self.derives_columns() and ROWWISE in children)
        ]

    def described(self) -> str:
        """A description of the weight that must be the same on all ranks."""
        planes = ", ".join(f"{plane.direction.value} {plane.format.name}" for plane in self.weight.planes())
        return f"{type(self.weight).__name__} {list(self.weight.shape)} of {planes}"

    def derives_columns(self) -> bool:
        return self.weight._get_quantizer().derives_columns

    def lacks_rows(self) -> bool:
        """Whether the columns are made from rows that the weight does not keep."""
        usages = self.weight.get_usages()
        return self.derives_columns() and usages["columnwise"] and not usages["rowwise"]

    def needs_whole(self) -> bool:
        """Whether its codes depend on the numbers of other ranks, not only on their amaxes."""
        planes = [(quantizer, plane) for quantizer, storage in self.holders() for plane in storage.planes()]
        return self.lacks_rows() or any(needs_neighbours(q.encoding(plane.direction)) for q, plane in planes)


@dataclass
class _Part:
    """A plane to write, and the amaxes for its scales."""

    storage: QuantizedTensorStorage
    target: Target
    block_max: Tensor | None
    shard: Tensor | None
    groups: Any = None  # whose ranks have other parts of the weight, and its amax in common


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Shard] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write pieces of float32 masters into quantized weights of any format, also hybrids.

    Pieces are cast to the weight's dtype. Scales are computed from the whole master over all ranks. Scales, and the
    codes of this rank's pieces in every plane, are bit for bit what ``weight.quantize_(master)`` would give. All other
    codes are unchanged. Numbers that no rank has count as zero. Preserved initial values are dropped.

    With several ranks, a weight is complete only after its codes have been gathered. Then call
    `post_all_gather_processing`, which makes the planes that follow from the rows: columns of formats with a scale for
    the whole tensor or with square tiles, and columns of hybrids with ``columnwise_source="rowwise_dequantized"``.
    Until then, reading these planes is an error; or, for the former without ``manual_post_all_gather_processing``, they
    are dropped and made when they are needed next. A weight that is only partly gathered, because `replace_raw_data`
    has moved only some of its codes, is written completely on every rank.

    Args:
        model_weights: the quantized weights. Every rank must list the same weights in the same order. A weight may be
            listed several times, with different pieces.
        master_weights: for each weight, the piece of its flattened master that this rank has, or None. Where several
            ranks have the same numbers, these must be equal.
        start_offsets: for each piece, where it begins in the flattened master, or None.
        group: the ranks that have the other pieces; None if this process has everything.
        fsdp_shard_model_weights: for each weight, where to write the codes of the piece instead of the weight's own
            buffer: a tensor, or one for each plane.
        manual_post_all_gather_processing: the caller calls `post_all_gather_processing` for all weights.

    Raises:
        TypeError, ValueError, NotImplementedError: a weight or a piece is invalid or not supported. All ranks raise,
            and nothing is written.
    """
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    problem: Exception | None = None
    weights: list[_Weight] = []
    try:
        weights = _checked(model_weights, master_weights, start_offsets, fsdp_shard_model_weights)
        _refuse_unshared_randomness([item for item in weights if ranks > 1 or not item.is_complete()], ranks)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        problem = error
    _raise_together(problem, weights, group, ranks)
    with torch.no_grad():
        for item in weights:
            note_place(item.weight)
        _write(weights, group, ranks)
        for item in weights:
            clear_preserved_value(item.weight)
            if ranks > 1 and not is_written_whole(item.weight):
                leave_for_processing(item.weight, manual_post_all_gather_processing)


cast_master_weights_to_fp8 = quantize_master_weights


def _checked(
    weights: Sequence[Any],
    masters: Sequence[Tensor | None],
    starts: Sequence[int | None],
    shards: Sequence[Shard] | None,
) -> list[_Weight]:
    """Return the weights, each once; raise if an argument is wrong."""
    shards = [None] * len(weights) if shards is None else shards
    if not len(weights) == len(masters) == len(starts) == len(shards):
        raise ValueError(
            f"quantize_master_weights needs lists of the same length, got {len(weights)} weights, {len(masters)} "
            f"masters, {len(starts)} offsets and {len(shards)} shards"
        )
    found: dict[int, _Weight] = {}
    for index, (weight, master, start, shard) in enumerate(zip(weights, masters, starts, shards, strict=True)):
        where = f"quantize_master_weights: weight {index}"
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(f"{where} must be a quantized tensor, got a {type(weight).__name__}")
        item = found.setdefault(id(weight), _Weight(weight))
        if not item.spans:
            _check_weight(weight, where)
        if (master is None) != (start is None):
            raise ValueError(f"{where}: a master and its offset must both be given, or both be None")
        if master is None or start is None:
            continue
        end = start + master.numel()
        if start < 0 or end > weight.numel():
            raise ValueError(f"{where} has {weight.numel()} elements; [{start}, {end}) is not a piece of it")
        if not master.is_floating_point() or master.device != weight.device:
            raise ValueError(
                f"{where} on {weight.device} needs a floating-point master on the same device, got {master.dtype} on "
                f"{master.device}"
            )
        item.spans.append((start, end))
        item.pieces.append(master.detach().reshape(-1))
        if shard is not None:
            item.shard = _checked_shard(item, shard, where)
        else:
            _check_memory(item, where)
    return list(found.values())


def _check_weight(weight: QuantizedTensor, where: str) -> None:
    if not any(weight.get_usages().values()):
        raise ValueError(
            f"{where}: this {type(weight).__name__} of shape {list(weight.shape)} holds no data: both rowwise and "
            "columnwise are absent"
        )
    if not weight.planes() or (isinstance(weight, HybridQuantizedTensorStorage) and _has_custom_child(weight)):
        raise NotImplementedError(
            f"{where}: a {type(weight).__name__} has no planes of crossgrain's formats, so no master can be written to "
            "it"
        )
    if settings.strict:
        _refuse_what_is_lifted(weight, where)
    weight._get_quantizer().check_writable(weight)


def _refuse_what_is_lifted(weight: QuantizedTensor, where: str) -> None:
    """In strict mode, refuse weights for which Transformer Engine has no kernels."""
    if not isinstance(weight, HybridQuantizedTensorStorage):
        if any(plane.format.scale_rule == "two_level" and plane.format.block == (1, 16) for plane in weight.planes()):
            refuse_if_strict("masters of NVFP4 1x16", f"{where} of shape {list(weight.shape)} has blocks of 1x16")
        return
    if weight._get_quantizer().derives_columns:
        refuse_if_strict(
            "masters of derived columns",
            f"{where}: a hybrid of shape {list(weight.shape)} with columnwise_source='rowwise_dequantized'",
        )
    for direction, child in weight._children().items():
        if any(plane.format.block is not None for plane in child.planes()):
            refuse_if_strict(
                "masters of block formats in a hybrid",
                f"{where}: writing a master to the {direction.value} child of a hybrid of shape {list(weight.shape)} "
                f"that has block scales ({type(child._get_quantizer()).__name__}) is not supported yet",
            )


def _check_memory(item: _Weight, where: str) -> None:
    """Raise if a sharding wrapper has freed the memory of a weight while its tensors still exist."""
    for plane in item.weight.planes():
        if plane.data.numel() and not plane.data.untyped_storage().nbytes():
            raise ValueError(
                f"{where}: the memory of its {plane.direction.value} codes was freed, and no shard is given; pass "
                "fsdp_shard_model_weights"
            )


def _refuse_unshared_randomness(weights: Sequence[_Weight], ranks: int) -> None:
    for item in weights:
        quantizer: Any = item.weight._get_quantizer()
        for own, storage in item.holders():
            rounds = any(own.encoding(plane.direction).stochastic for plane in storage.planes())
            if rounds and own.part is not None and len(own.part.segments) > 1:
                raise NotImplementedError(
                    f"quantize_master_weights: this {type(item.weight).__name__} is rounded stochastically, and has "
                    f"{len(own.part.segments)} pieces that tensor-parallel ranks divide separately. Its master can "
                    "only be written as a whole: round the weight to nearest, or do not cut its master"
                )
        if ranks > 1 and item.lacks_rows() and quantizer._quantizer_of(ROWWISE).encoding(ROWWISE).stochastic:
            raise NotImplementedError(
                f"quantize_master_weights: the columns of this {type(item.weight).__name__} are made from "
                "stochastically rounded rows that it does not keep, so each rank would round differently; keep the "
                "rows, or round them to nearest"
            )


def _has_custom_child(weight: HybridQuantizedTensorStorage) -> bool:
    return any(not child._plane_buffers for child in weight._children().values())


def _checked_shard(item: _Weight, shard: Shard, where: str) -> Shard:
    planes = [plane for _, storage in item.holders() for plane in storage.planes()]
    shards = (shard,) if shard is None or isinstance(shard, Tensor) else tuple(shard)
    if len(item.spans) > 1 or len(shards) != len(planes):
        raise ValueError(
            f"{where}: fsdp_shard_model_weights needs one piece and one shard per plane, got {len(item.spans)} pieces "
            f"and {len(shards)} shards for {len(planes)} planes"
        )
    size = item.pieces[0].numel()
    for plane, own in zip(planes, shards, strict=True):
        if plane.format.element is not None and plane.format.element.bits != 8:
            raise NotImplementedError(
                f"{where}: fsdp_shard_model_weights does not support {plane.format.name}, whose pieces may end inside "
                "a byte"
            )
        if own is not None and (own.numel() != size or own.dtype != plane.data.dtype):
            raise ValueError(
                f"{where}: the shard of its {plane.direction.value} plane must have {size} elements of "
                f"{plane.data.dtype}, got {own.numel()} of {own.dtype}"
            )
    return shards


def _raise_together(problem: Exception | None, weights: Sequence[_Weight], group: Any, ranks: int) -> None:
    """Raise on all ranks if one has a problem or lists other weights; otherwise amaxes would be mixed up."""
    listed = [item.described() for item in weights]
    mine = [problem is not None, zlib.crc32(str(listed).encode())]
    found = exchanged(mine, group, ranks, torch.device("cpu"))
    if problem is not None:
        raise problem
    if any(refused for refused, _ in found):
        raise RuntimeError(
            "quantize_master_weights: another rank raised an error about its weights; nothing was written"
        )
    others = [rank for rank, (_, other) in enumerate(found) if other != found[0][1]]
    if others:
        raise ValueError(
            f"quantize_master_weights: all ranks must list the same weights in the same order, but ranks {others} of "
            f"the group differ from rank 0. This rank lists {len(listed)}, beginning with {'; '.join(listed[:3])}. "
            "Nothing was written."
        )


# ---- writing -----------------------------------------------------------------------------------------


def _write(weights: Sequence[_Weight], group: Any, ranks: int) -> None:
    pending = []
    for item in weights:
        if item.weight.numel() == 0 or (ranks == 1 and item.is_complete()):
            item.weight.quantize_(item.matrix().view(item.weight.shape))
        elif is_written_whole(item.weight) or item.needs_whole():
            x = _assembled(item, group, ranks)
            if is_written_whole(item.weight):
                item.spans = [(0, item.weight.numel())]
            parts = _parts(item, x)
            _reduce_overall(parts, group)
            _write_parts(item, x, parts, group, ranks)
            if is_written_whole(item.weight):
                post_all_gather_processing(item.weight)
        else:
            pending.append((item, _parts(item, item.matrix())))
    measured = [part for _, parts in pending for part in parts]
    _reduce(measured, group, ranks)
    _reduce_overall(measured, group)
    for item, parts in pending:
        _write_parts(item, item.matrix(), parts, group, ranks)  # made again: keeping all would double the model


def _assembled(item: _Weight, group: Any, ranks: int) -> Tensor:
    """The whole matrix, put together from all ranks. Bytes that a rank does not have are zero there."""
    x = item.matrix()
    if ranks > 1:
        torch.distributed.all_reduce(x.view(torch.uint8), op=torch.distributed.ReduceOp.MAX, group=group)
    if not item.lacks_rows():
        return x
    quantizer = item.weight._get_quantizer()
    assert isinstance(quantizer, HybridQuantizer)
    rows = quantizer._quantizer_of(ROWWISE).quantize_impl(x)
    return cast(Tensor, rows.dequantize(dtype=x.dtype).detach())


def _parts(item: _Weight, x: Tensor) -> list[_Part]:
    """The planes to write, with the amaxes of ``x``."""
    shards = iter(item.shard if isinstance(item.shard, tuple) else ())
    parts = []
    for quantizer, storage in item.holders():
        targets = quantizer._targets(quantizer._in_own_formats(storage.planes()))
        for target in placed(targets, [(quantizer, len(targets))], *item.weight._matrix):
            overall, block_max = part_amaxes(x, target)
            shares = quantizer.with_amax_reduction and quantizer._shares_amax(target)
            groups = quantizer.amax_reduction_group if shares else None
            parts.append(_Part(storage, target.with_amax(overall), block_max, next(shards, None), groups))
    return parts


def _reduce(parts: Sequence[_Part], group: Any, ranks: int) -> None:
    """Take the maximum of all amaxes over the ranks, in one collective."""
    amaxes = [amax for part in parts for amax in (part.target.amax, part.block_max) if amax is not None]
    if ranks == 1:
        return
    reduced = iter(maximised(amaxes, group))
    for part in parts:
        if part.target.amax is not None:
            part.target = part.target.with_amax(next(reduced))
        if part.block_max is not None:
            part.block_max = next(reduced)


def _reduce_overall(parts: Sequence[_Part], group: Any) -> None:
    """Take the maximum of amaxes over tensor-parallel ranks too, which have other parts of the same weight."""
    by_groups: dict[Any, list[_Part]] = {}
    for part in parts:
        others = without_group(part.groups, group)
        if others is not None:
            by_groups.setdefault(others, []).append(part)
    for groups, sharing in by_groups.items():
        with_amax = [part for part in sharing if part.target.amax is not None]
        amaxes = [part.target.amax for part in with_amax if part.target.amax is not None]
        for part, amax in zip(with_amax, maximised(amaxes, groups), strict=True):
            part.target = part.target.with_amax(amax)


def _write_parts(item: _Weight, x: Tensor, parts: Sequence[_Part], group: Any, ranks: int) -> None:
    seed = _shared_seed(item, group, ranks) if any(part.target.encoding.stochastic for part in parts) else None
    weight = item.weight
    columns = columns_made_from_rows(weight)
    with nullcontext() if columns is not None and ranks > 1 else _one_write(weight):
        for quantizer, storage in item.holders():
            own = [part for part in parts if part.storage is storage]
            quantizer._observe([part.target for part in own])
            for part in own:
                write_part(x, part.target, part.block_max, item.spans, seed, part.shard)
            quantizer._note_formats(storage, storage.planes())
            if columns is not None:
                storage._mark_written()  # so that the columns are known to be old
        if columns is not None and ranks == 1:
            make_columns_from_rows(weight, columns)
    if observer.observers:
        _tell(item, x, parts, seed)


def _tell(item: _Weight, x: Tensor, parts: Sequence[_Part], seed: int | None) -> None:
    """Show observers what was written. Codes of numbers that other ranks have are not here."""
    for quantizer, storage in item.holders():
        own = [part.target for part in parts if part.storage is storage]
        made = zip(own, quantizer.directions_served([target.plane for target in own]), strict=True)
        observer.tell(quantizer.subject, x, list(made), seed, complete=item.is_complete())


def _shared_seed(item: _Weight, group: Any, ranks: int) -> int:
    """The seed of the first of all ranks that have pieces of the weight, or other tensor-parallel parts of it."""
    parts = [quantizer.part.group for quantizer, _ in item.holders() if quantizer.part is not None]
    groups = joined_groups(group if ranks > 1 else None, *parts[:1])
    seed = draw_seed(item.holders()[0][0].subject)
    return seed if groups is None else agreed_seed(seed, groups)


@contextmanager
def _one_write(weight: QuantizedTensorStorage) -> Iterator[None]:
    if isinstance(weight, HybridQuantizedTensorStorage):
        with weight._writing():
            yield
    else:
        yield
        weight._mark_written()
