"""Context parallelism: each rank has two chunks of every sequence (`chunks`), and ranks exchange queries, keys, values.

p2p         keys and values go around a ring (`ring_attention`); queries stay
all_gather  every rank gets the keys and values of all ranks; queries stay
a2a         every rank gets whole sequences, but only some heads, and sends its part of the output back:

               rank 0                rank 1                       rank 0           rank 1
    tokens     0 1 6 7               2 3 4 5            tokens    0 1 2 ... 7      0 1 2 ... 7
    heads      0 1 2 3               0 1 2 3      -->   heads     0 1              2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime.collectives import (
    AwaitedGroup,
    exchanged_with_gradient,
    gathered_rows,
    gathered_with_gradient,
    group_rank,
    group_size,
    maximise_,
)
from ...runtime.host_and_device import on_device, require
from .arrangement import Arranged, Inputs, Lengths, MaskTensor
from .chunks import checked_starts, tokens_of_rank, whole_positions
from .layout import Layout, check_fits
from .masks import Places, allowed_pairs
from .plain_attention import Attended, PlainCall, plain_attention
from .ring_attention import Ring, ring_attention

COMMUNICATION = ("p2p", "all_gather", "a2a")


class ContextParallel(NamedTuple):
    """How ranks share sequences.

    Attributes:
        layer: name of the layer, for messages.
        group: the process group.
        rank: this rank in the group.
        ranks: number of ranks; more than 1.
        how: "p2p", "all_gather" or "a2a".
    """

    layer: str
    group: Any
    rank: int
    ranks: int
    how: str

    # ---- p2p and all_gather: this rank's queries on the keys of all ranks ---------------------------

    def arranged(self, inputs: Inputs) -> Arranged:
        """Arrange the chunks of this rank. Keys of ``allowed`` are those of rank 0, then of rank 1 and so on."""
        query, key = (
            [_part(self, x, inputs.format, lengths, rank) for rank in range(self.ranks)]
            for x, lengths in zip((inputs.query, inputs.key), inputs.lengths, strict=True)
        )
        layouts = query[self.rank].layout, key[self.rank].layout
        q = layouts[0].heads_first(inputs.query)
        k, v = (layouts[1].heads_first(x) for x in (inputs.key, inputs.value))
        places = [part.places for part in key]
        keys = Places(
            torch.cat([each.positions for each in places], -1),
            places[0].lengths,
            None
            if places[0].valid is None
            else torch.cat([each.valid for each in places if each.valid is not None], -1),
        )
        allowed = allowed_pairs(inputs.mask, query[self.rank].places, keys)
        return Arranged(q, k, v, inputs.mask, allowed, layouts[0])

    def attended(self, made: Arranged, call: PlainCall) -> Attended:
        """Attention of this rank's queries on the keys of all ranks. The largest scores are those of its queries."""
        if self.how == "p2p":
            ring = Ring(self.group, call.scale, call.allowed, call.wants_max)
            return ring_attention(made.q, made.k, made.v, ring, call.sink)
        k, v = (gathered_with_gradient(x.movedim(2, 0), self.group).movedim(0, 2) for x in (made.k, made.v))
        return plain_attention(made.q, k, v, call)

    def with_whole_keys(self, inputs: Inputs) -> Arranged:
        """This rank's queries, and the keys and values of whole sequences in their order, as blocks of formats need it.

        Gradients of keys and values are summed over the ranks.
        """
        made = self.arranged(inputs)
        places = [_part(self, inputs.key, inputs.format, inputs.lengths[1], rank).places for rank in range(self.ranks)]
        positions = torch.cat([each.positions for each in places], -1)
        if inputs.format == "thd":  # shorter sequences have places without tokens, which come last
            valid = torch.cat([each.valid for each in places if each.valid is not None], -1)
            positions = positions.masked_fill(~valid, torch.iinfo(positions.dtype).max)
        order = positions.argsort(dim=-1, stable=True)[:, None, :]
        k, v = (gathered_with_gradient(x.movedim(2, 0), self.group).movedim(0, 2) for x in (made.k, made.v))
        k, v = (x.gather(2, order[..., None].expand(*x.shape[:2], -1, x.shape[3])) for x in (k, v))
        allowed = made.allowed
        if allowed is not None:
            shape = torch.broadcast_shapes(allowed.shape, (len(order), 1, 1, 1))
            allowed = allowed.expand(shape).gather(-1, order[:, None].expand(shape))
        return made._replace(k=k, v=v, allowed=allowed)

    # ---- a2a: whole sequences of some heads ---------------------------------------------------------

    def with_whole_sequences(self, inputs: Inputs) -> Inputs:
        """The inputs of this rank's heads, for whole sequences."""
        queries, keys = inputs.lengths
        return inputs._replace(
            query=self._whole(inputs.query, inputs.format, queries),
            key=self._whole(inputs.key, inputs.format, keys),
            value=self._whole(inputs.value, inputs.format, keys),
        )

    def own_heads(self, by_head: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that has all heads."""
        return by_head.chunk(self.ranks, dim)[self.rank]

    def _whole(self, x: Tensor, fmt: str, lengths: Lengths) -> Tensor:
        along = _sequence_dim(fmt)
        heads = (
            x.movedim(along, 0).unflatten(-2, (self.ranks, -1)).movedim(-3, 0)
        )  # [ranks, tokens, ..., heads, channels]
        found = exchanged_with_gradient(heads, self.group).flatten(0, 1)
        return found[self._order(x, fmt, lengths).argsort()].movedim(0, along)

    def own_tokens(self, output: Tensor, like: Tensor, fmt: str, lengths: Lengths) -> Tensor:
        """Exchange the output of this rank's heads for whole sequences against that of all heads for its own tokens.

        Args:
            output: the output for whole sequences, heads and channels joined.
            like: the queries of this rank.
            fmt: layout of both.
            lengths: lengths of the whole sequences.
        """
        along = _sequence_dim(fmt)
        tokens = output.movedim(along, 0)[self._order(like, fmt, lengths)]
        parts = exchanged_with_gradient(tokens.unflatten(0, (self.ranks, -1)), self.group)
        return parts.movedim(0, -2).flatten(-2).movedim(0, along)

    def _order(self, x: Tensor, fmt: str, lengths: Lengths) -> Tensor:
        """The places in whole sequences of the tokens of rank 0, then of rank 1 and so on."""
        starts = _starts(self, x, fmt, lengths)
        count = x.shape[_sequence_dim(fmt)]
        return torch.cat([tokens_of_rank(starts, rank, self.ranks, count) for rank in range(self.ranks)])

    # ---- results -------------------------------------------------------------------------------------

    def largest(self, max_logit: Tensor) -> Tensor:
        """The largest score of each head, over all ranks."""
        if self.how == "a2a":
            return gathered_rows(max_logit, self.group)
        maximise_(max_logit, self.group)
        return max_logit


def context_parallel(
    layer: str, group: Any, global_ranks: Sequence[int] | None, how: str, heads: int, groups: int
) -> ContextParallel | None:
    """How ranks share sequences; None if they do not.

    Args:
        layer: name of the layer, for messages.
        group: the process group, or None.
        global_ranks: the ranks of the group, or None.
        how: "p2p", "all_gather" or "a2a".
        heads: number of heads of queries on this rank.
        groups: number of heads of keys and values on this rank.
    """
    if group is None:
        return None
    if isinstance(group, AwaitedGroup):
        raise RuntimeError(group.problem)
    check_communication(layer, group, how)
    ranks = group_size(group)
    if ranks == 1:
        return None
    if global_ranks is not None and list(global_ranks) != dist.get_process_group_ranks(group):
        raise ValueError(
            f"{layer}: cp_global_ranks={list(global_ranks)}, but the ranks of cp_group are "
            f"{dist.get_process_group_ranks(group)}"
        )
    if how == "a2a" and (heads % ranks or groups % ranks):
        raise ValueError(
            f"{layer}: cp_comm_type='a2a' divides heads among {ranks} ranks, which is not possible for {heads} heads "
            f"of queries and {groups} of keys and values; use 'p2p' or 'all_gather'"
        )
    return ContextParallel(layer, group, group_rank(group), ranks, how)


def check_communication(layer: str, group: Any, how: str) -> None:
    """Raise if the way to communicate is not known, or not supported."""
    if isinstance(group, list | tuple) or how == "a2a+p2p":
        raise NotImplementedError(
            f"{layer}: cp_comm_type='a2a+p2p' with two process groups is not supported; use {', '.join(COMMUNICATION)} "
            "with one group"
        )
    if how not in COMMUNICATION:
        raise ValueError(f"{layer}: cp_comm_type must be one of {', '.join(COMMUNICATION)}, got {how!r}")


def check_supported(inputs: Inputs, attention_mask: MaskTensor | None, *, dropout: float, caches: bool) -> None:
    """Raise if a call has what cannot be divided among ranks."""
    by_mask = "attention_mask; give the lengths of the whole sequences as cu_seqlens_q and cu_seqlens_kv"
    refused = {
        "attention_dropout": dropout > 0,
        "inference_params": caches,
        "attn_mask_type='arbitrary'": inputs.mask.type == "arbitrary",
        by_mask: inputs.mask.padding and attention_mask is not None,
    }
    for what, given in refused.items():
        if given:
            raise NotImplementedError(f"{inputs.layer}: context parallelism (cp_group) does not support {what}")
    if inputs.mask.padding and any(each.cu_seqlens is None for each in inputs.lengths):
        raise ValueError(
            f"{inputs.layer}: with context parallelism (cp_group), a padding mask needs cu_seqlens_q and cu_seqlens_kv "
            "of the whole sequences"
        )


class _Part(NamedTuple):
    layout: Layout
    places: Places


def _part(cp: ContextParallel, x: Tensor, fmt: str, lengths: Lengths, rank: int) -> _Part:
    """The chunks of a rank. Their shape is that of ``x``, this rank's chunks."""
    starts = _starts(cp, x, fmt, lengths)
    parts = (starts.diff() // cp.ranks)[:, None]  # tokens of each sequence that a rank has
    places = torch.arange(int(parts.max()) if fmt == "thd" else x.shape[_sequence_dim(fmt)], device=x.device)
    positions = whole_positions(places, parts, rank, cp.ranks)
    if lengths.cu_seqlens is None:
        return _Part(Layout(fmt), Places(positions, len(places) * cp.ranks))
    real = lengths.cu_seqlens.diff().to(positions)
    if fmt != "thd":
        return _in_batch(x, fmt, positions, real, cp)
    valid = (places < parts) & (positions < real[:, None])
    tokens = (starts[:-1, None] // cp.ranks + places).where(places < parts, 0)
    return _Part(Layout(fmt, valid, tokens), Places(positions, real, valid))


def _in_batch(x: Tensor, fmt: str, positions: Tensor, real: Tensor, cp: ContextParallel) -> _Part:
    """Sequences of the lengths ``real`` in the rows of a batch."""
    batch, whole = x.shape[1 - _sequence_dim(fmt)], x.shape[_sequence_dim(fmt)] * cp.ranks
    check_fits(real, batch, whole, f"{cp.layer}: ", f" on {cp.ranks} ranks")
    valid = positions < real[:, None]
    return _Part(Layout(fmt, valid), Places(positions, real, valid))


def _starts(cp: ContextParallel, x: Tensor, fmt: str, lengths: Lengths) -> Tensor:
    """Where whole sequences begin: one for "sbhd" and "bshd", whose batch is another dimension."""
    if fmt != "thd":
        whole = x.shape[_sequence_dim(fmt)] * cp.ranks
        return checked_starts(cp.layer, on_device([0, whole], x.device), cp.ranks)
    starts = lengths.cu_seqlens if lengths.cu_seqlens_padded is None else lengths.cu_seqlens_padded
    if starts is None:
        raise ValueError(f"{cp.layer}: qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv of the whole sequences")
    starts = checked_starts(cp.layer, starts.to(x.device), cp.ranks)
    known = f"{cp.layer}: each of {cp.ranks} ranks has {len(x)} tokens, but cu_seqlens, which is for whole sequences,"
    require(
        starts[-1] == len(x) * cp.ranks,
        f"{known} ends at another number of tokens",
        lambda: f"{known} ends at {int(starts[-1])} tokens",
    )
    return starts


def _sequence_dim(fmt: str) -> int:
    return 1 if fmt == "bshd" else 0
