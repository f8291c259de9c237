"""Arrange queries, keys and values as [batch, heads, sequence, channels], and find out which pairs may meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kv_cache import InferenceParams
from .layout import Layout, without_padding
from .masks import Mask, Places, allowed_pairs, decoding_mask

MaskTensor = Tensor | tuple[Tensor, Tensor]


class Lengths(NamedTuple):
    """The lengths of sequences of queries, or of keys, as callers give them; see `DotProductAttention.forward`."""

    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    longest: int | None = None


class Inputs(NamedTuple):
    """The inputs of a call, in the layout ``format``.

    Attributes:
        layer: name of the layer, for messages.
        query: queries.
        key: keys.
        value: values.
        format: "sbhd", "bshd" or "thd".
        mask: the mask.
        lengths: lengths of the sequences of queries, and of keys.
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    format: str
    mask: Mask
    lengths: tuple[Lengths, Lengths]


class Arranged(NamedTuple):
    """What attention is computed on.

    Attributes:
        q: queries [batch, heads, queries, channels].
        k: keys [batch, groups, keys, channels].
        v: values [batch, groups, keys, channels].
        mask: the mask.
        allowed: True where a query may see a key; None for a plain causal mask, or if all may see all.
        layout: the layout of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    allowed: Tensor | None
    layout: Layout


def arranged(
    inputs: Inputs,
    attention_mask: MaskTensor | None,
    *,
    cross: bool,
    cache: InferenceParams | None = None,
    layer_number: int = 1,
) -> Arranged:
    """Arrange whole sequences.

    Args:
        inputs: the inputs.
        attention_mask: mask of the user.
        cross: whether queries and keys are of different sequences.
        cache: the cache of keys and values of earlier steps, if there is one.
        layer_number: number of the layer in the cache.
    """
    mask, fmt = inputs.mask, inputs.format
    sides, excluded = [Layout(fmt), Layout(fmt)], None
    if mask.padding:
        sides = [
            Layout.of_sequences(fmt, x, *lengths)
            for x, lengths in zip((inputs.query, inputs.key), inputs.lengths, strict=True)
        ]
        if cache is None:
            sides = _with_padding(inputs.layer, sides, attention_mask, cross)
    elif mask.type == "arbitrary":
        if not isinstance(attention_mask, Tensor):
            raise ValueError(f"{inputs.layer}: attn_mask_type='arbitrary' needs an attention_mask tensor")
        excluded = attention_mask.to(torch.bool)
    q = sides[0].heads_first(inputs.query)
    k, v = sides[1].heads_first(inputs.key), sides[1].heads_first(inputs.value)
    valid_queries, valid_keys = (side.valid for side in sides)
    if cache is not None:
        mask = decoding_mask(mask)
        step = cache.step(layer_number, k.transpose(1, 2), v.transpose(1, 2))
        valid_queries, valid_keys = step.valid_queries, step.valid_keys
        q = without_padding(q, valid_queries)
        k, v = (without_padding(x.transpose(1, 2).to(q.dtype), valid_keys) for x in (step.keys, step.values))
    allowed = None
    if not mask.is_plain_causal:
        queries = Places.from_start(q.shape[2], valid_queries, q.device)
        allowed = allowed_pairs(mask, queries, Places.from_start(k.shape[2], valid_keys, k.device), excluded)
    return Arranged(q, k, v, mask, allowed, sides[0])


def _with_padding(layer: str, sides: list[Layout], attention_mask: MaskTensor | None, cross: bool) -> list[Layout]:
    """Add padding from the mask, if there is one; otherwise the layouts have it from cu_seqlens already."""
    if attention_mask is None:
        if any(side.valid is None for side in sides):
            raise ValueError(f"{layer}: a padding mask needs an attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        return sides
    if isinstance(attention_mask, Tensor) and cross:
        raise ValueError(
            f"{layer}: padding in cross attention needs a pair of masks, for queries and for keys, got one mask"
        )
    masks = (attention_mask, attention_mask) if isinstance(attention_mask, Tensor) else attention_mask
    for mask in masks:
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
            raise ValueError(f"{layer}: a padding mask must be [batch, 1, 1, sequence], got {list(mask.shape)}")
    return [side.with_valid(~mask[:, 0, 0].to(torch.bool)) for side, mask in zip(sides, masks, strict=True)]
