"""Attention of this rank's queries on the keys of all ranks, which go around a ring.

    step      0      1      2      3        the keys and values that a rank has, of 4 ranks;
    rank 0   kv 0   kv 3   kv 2   kv 1      after each step it passes them to the next rank
    rank 1   kv 1   kv 0   kv 3   kv 2
    rank 2   kv 2   kv 1   kv 0   kv 3
    rank 3   kv 3   kv 2   kv 1   kv 0

No rank has more than the keys and values of one rank at a time. Forward joins the results of the steps by their largest
scores and sums of exponentials. Backward sends the keys around once more, and their gradients with them, which are
complete when they are back at the rank that has the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.collectives import group_rank, group_size, passed_on
from ...runtime.derivatives import differentiable_once
from .layout import to_groups, to_heads
from .plain_attention import Attended
from .softmax import largest_by_head


class Ring(NamedTuple):
    """Everything about one call except its tensors.

    Attributes:
        group: the process group.
        scale: factor of the scores.
        allowed: True where one of this rank's queries may see a key, for the keys of rank 0, then of rank 1 and so on:
            broadcasts to [batch, heads, queries, ranks · keys]. None if every query may see every key.
        wants_max: whether the largest score of each head is wanted.
    """

    group: Any
    scale: float
    allowed: Tensor | None
    wants_max: bool = False

    def around(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rank that ``x`` comes from and its ``x``, for each step."""
        ranks, source = group_size(self.group), group_rank(self.group)
        for step in range(ranks):
            yield source, x
            if step < ranks - 1:
                x, source = passed_on(x, self.group), (source - 1) % ranks

    def seen(self, source: int, keys: int) -> Tensor | None:
        """Which keys of a rank may be seen."""
        return None if self.allowed is None else self.allowed[..., source * keys : (source + 1) * keys]

    def scores(self, q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
        scores = to_heads(to_groups(q, k.shape[1]) @ k.transpose(-1, -2), q.shape) * self.scale
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, sink: Tensor | None = None) -> Attended:
    """Compute attention of this rank's q [batch, heads, queries, channels] on the k and v of all ranks.

    Each rank has k and v [batch, groups, keys, channels] of the same shape. Queries that may see no key give 0.
    ``sink`` [1, heads, 1, 1] is the score of the sink by head. The largest scores are those of this rank's queries.
    """
    return Attended(*_RingAttention.apply(q, k, v, sink, ring))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries, groups, channels = q.to(dtype), k.shape[1], [k.shape[-1], v.shape[-1]]
        # For each query: the largest score so far, the sum of exp(score - largest), and the sum of these times values.
        largest = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=dtype)
        total = torch.zeros_like(largest)
        if sink is not None:
            largest, total = sink.to(dtype).expand_as(largest), torch.ones_like(largest)
        output = q.new_zeros(*q.shape[:3], channels[1], dtype=dtype)
        max_logit = None
        for source, kv in ring.around(torch.cat((k, v), -1)):
            keys, values = kv.to(dtype).split(channels, -1)
            scores = ring.scores(queries, keys, ring.seen(source, k.shape[2]))
            if ring.wants_max:
                here = largest_by_head(scores, None)
                max_logit = here if max_logit is None else torch.maximum(max_logit, here)
            higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0)  # of queries that have seen no key yet
            weights, kept = (scores - base).exp(), (largest - base).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            output = output * kept + to_heads(to_groups(weights, groups) @ values, q.shape)
            largest = higher
        sees_nothing = total == 0
        output = output / total.masked_fill(sees_nothing, 1)
        log_sum = (largest + total.log()).masked_fill(sees_nothing, 0)
        ctx.save_for_backward(q, k, v, sink, output, log_sum)
        ctx.ring = ring
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return output.to(q.dtype), max_logit

    @staticmethod
    @differentiable_once("attention over ranks")
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> Any:
        q, k, v, sink, output, log_sum = ctx.saved_tensors
        ring, dtype = ctx.ring, output.dtype
        groups, channels = k.shape[1], [k.shape[-1], v.shape[-1]]
        queries, do = q.to(dtype), do.to(dtype)
        mean = (do * output).sum(-1, keepdim=True)
        dq, dkv = torch.zeros_like(queries), k.new_zeros(*k.shape[:3], sum(channels), dtype=dtype)
        for source, kv in ring.around(torch.cat((k, v), -1)):
            keys, values = kv.to(dtype).split(channels, -1)
            p = (ring.scores(queries, keys, ring.seen(source, k.shape[2])) - log_sum).exp()
            dp = to_heads(to_groups(do, groups) @ values.transpose(-1, -2), q.shape)
            ds = p * (dp - mean) * ring.scale
            dq = dq + to_heads(to_groups(ds, groups) @ keys, q.shape)
            dk = to_groups(ds, groups).transpose(-1, -2) @ to_groups(queries, groups)
            dv = to_groups(p, groups).transpose(-1, -2) @ to_groups(do, groups)
            dkv = passed_on(dkv + torch.cat((dk, dv), -1), ring.group)  # with the keys, and at last home
        dk, dv = dkv.split(channels, -1)
        dsink = None
        if sink is not None:
            dsink = -((sink.to(dtype) - log_sum).exp() * mean).sum((0, 2), keepdim=True).to(sink.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None
