"""Attention in high precision: by torch's kernels, or written out where these lack a softmax or a result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import to_groups, to_heads
from .masks import Mask, whole_sequence_pairs
from .softmax import largest_by_head, softmax


class Attended(NamedTuple):
    """The output [batch, heads, queries, channels], and the largest score of each head if it was asked for."""

    output: Tensor
    max_logit: Tensor | None


class PlainCall(NamedTuple):
    """Everything about one call except q, k and v.

    Attributes:
        mask: the mask.
        allowed: True where a query may see a key; None for a plain causal mask, or if all may see all.
        scale: factor of the scores.
        dropout: probability of dropout on the softmax.
        sink: the score of the sink by head, [1, heads, 1, 1]; None if there is none.
        wants_max: whether the largest score of each head is wanted.
    """

    mask: Mask
    allowed: Tensor | None
    scale: float
    dropout: float = 0.0
    sink: Tensor | None = None
    wants_max: bool = False


def plain_attention(q: Tensor, k: Tensor, v: Tensor, call: PlainCall) -> Attended:
    """Compute attention of q [batch, heads, queries, channels] on k and v [batch, groups, keys, channels].

    Queries that may see no key give 0.
    """
    if call.sink is not None or call.wants_max:
        return _written_out(q, k, v, call)
    attend = torch.nn.functional.scaled_dot_product_attention
    gqa = q.shape[1] != k.shape[1]
    allowed = call.allowed
    if allowed is None:
        causal = call.mask.is_plain_causal
        out = attend(q, k, v, dropout_p=call.dropout, is_causal=causal, scale=call.scale, enable_gqa=gqa)
        return Attended(out, None)
    allowed = allowed.view((1,) * (4 - allowed.dim()) + tuple(allowed.shape))  # that of a user may have fewer
    # A softmax over nothing is NaN in some kernels: such queries look at everything, and their result is dropped.
    sees_nothing = ~allowed.any(-1, keepdim=True)
    out = attend(q, k, v, attn_mask=allowed | sees_nothing, dropout_p=call.dropout, scale=call.scale, enable_gqa=gqa)
    return Attended(out.masked_fill(sees_nothing, 0), None)


def _written_out(q: Tensor, k: Tensor, v: Tensor, call: PlainCall) -> Attended:
    """Attention in fp32, or in float64 if the inputs are."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups, allowed = k.shape[1], call.allowed
    if allowed is None and call.mask.is_plain_causal:
        allowed = whole_sequence_pairs(call.mask, q, k)
    scores = to_heads(to_groups(q.to(dtype), groups) @ k.to(dtype).transpose(-1, -2), q.shape) * call.scale
    parts = softmax(scores, allowed, call.sink).keys
    p = torch.nn.functional.dropout(parts, call.dropout)
    out = to_heads(to_groups(p, groups) @ v.to(dtype), q.shape).to(q.dtype)
    return Attended(out, largest_by_head(scores, allowed) if call.wants_max else None)
