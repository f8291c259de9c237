"""``nn.MultiheadAttention`` with its projections in the formats of a recipe.

Torch computes it in one function that reads the weights directly. Here the projections are separate, and what is
between them - masks, scores, dropout - is computed as torch does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..recipe.projections import LayerAdapter, Multiply, Projection, register_layer


class TorchAttention(LayerAdapter):
    """``nn.MultiheadAttention``. Its ``out_proj`` is a linear layer of its own, which is converted and called."""

    def projections(self, module: Any) -> Sequence[Projection]:
        if module.in_proj_weight is not None:
            return [Projection("in_proj", "in_proj_weight", None if module.in_proj_bias is None else "in_proj_bias")]
        # Keys or values of another width have weights of their own; their biases are still one parameter.
        return [Projection(name, f"{name}_weight") for name in ("q_proj", "k_proj", "v_proj")]

    def forward(
        self,
        module: Any,
        multiply: Multiply,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention, with the arguments of ``nn.MultiheadAttention.forward``."""
        if is_causal and attn_mask is None:
            raise RuntimeError(f"{module.layer}: is_causal=True is a hint about attn_mask, which is needed as well")
        same = query is key and key is value
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif module.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = _projected(module, multiply, query, key, value, same)  # [length, batch, width]
        # Without a mask of padding the hint is enough, and the mask need not be read.
        hinted = is_causal and key_padding_mask is None and not need_weights
        mask = None if hinted else _mask(module, q, k, attn_mask, key_padding_mask)
        k, v, mask = _with_extra_keys(module, k, v, mask)
        y, weights = _attended(module, q, k, v, mask, need_weights, hinted)
        y = module.out_proj(y)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return (y.transpose(0, 1) if module.batch_first else y), weights


def _projected(module: Any, multiply: Multiply, query: Tensor, key: Tensor, value: Tensor, same: bool) -> list[Tensor]:
    """q, k and v. Inputs that are one tensor are quantized and multiplied once."""
    width = module.embed_dim
    if module.in_proj_weight is not None:
        if same:
            return list(multiply("in_proj", query).chunk(3, dim=-1))
        inputs = enumerate((query, key, value))
        return [multiply("in_proj", x, rows=slice(i * width, (i + 1) * width)) for i, x in inputs]
    made = [multiply(f"{name}_proj", x) for name, x in zip("qkv", (query, key, value), strict=True)]
    if module.in_proj_bias is None:
        return made
    return [x + bias.to(x.dtype) for x, bias in zip(made, module.in_proj_bias.chunk(3), strict=True)]


def _mask(
    module: Any, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """What is added to the scores: [batch, heads, queries, keys], or a shape that expands to it; None for nothing."""
    batch, heads = q.shape[1], module.num_heads
    mask = _added(attn_mask, "attn_mask", q.dtype)
    if mask is not None:
        shapes = {2: (len(q), len(k)), 3: (batch * heads, len(q), len(k))}
        if tuple(mask.shape) != shapes.get(mask.dim()):
            raise RuntimeError(
                f"{module.layer}: attn_mask must have the shape {list(shapes[2])} or {list(shapes[3])}, got "
                f"{list(mask.shape)}"
            )
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask[None, None]
    padding = _added(key_padding_mask, "key_padding_mask", q.dtype)
    if padding is None:
        return mask
    if tuple(padding.shape) != (batch, len(k)):
        raise RuntimeError(
            f"{module.layer}: key_padding_mask must have the shape {[batch, len(k)]}, got {list(padding.shape)}"
        )
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding


def _added(mask: Tensor | None, name: str, dtype: torch.dtype) -> Tensor | None:
    """A mask of numbers to add: a boolean one has -inf where it is True."""
    if mask is None or mask.dtype != torch.bool:
        if mask is not None and not mask.is_floating_point():
            raise TypeError(f"{name} must have boolean or floating-point numbers, got {mask.dtype}")
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)


def _with_extra_keys(module: Any, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append the keys and values of ``add_bias_kv`` and ``add_zero_attn``, which no mask hides."""
    batch = k.shape[1]
    if module.bias_k is not None:
        k, v = (
            torch.cat((x, bias.to(x.dtype).repeat(1, batch, 1))) for x, bias in ((k, module.bias_k), (v, module.bias_v))
        )
        mask = None if mask is None else F.pad(mask, (0, 1))
    if module.add_zero_attn:
        k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    return k, v, mask


def _attended(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """The output [length, batch, width], and the attention weights [batch, heads, queries, keys] if they are needed."""
    heads = module.num_heads
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-1, -2)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        y = weights @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
    return y.permute(2, 0, 1, 3).flatten(2), weights


register_layer(nn.MultiheadAttention, TorchAttention())
