"""How the output of one projection is cut into queries, keys and values, and the norms of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...gemm.norms import l2_normalized
from ..norm import LayerNorm, RMSNorm


def split_qkv(x: Tensor, heads: int, groups: int, channels: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., heads, channels], k and v [..., groups, channels] of x [..., (heads + 2 · groups) · channels].

    Interleaved, each group has its queries, its key and its value next to each other; otherwise all queries
    come first, then all keys, then all values.
    """
    if not interleaved:
        q, k, v = x.unflatten(-1, (-1, channels)).split([heads, groups, groups], -2)
        return q, k, v
    shared = heads // groups
    q, k, v = x.unflatten(-1, (groups, shared + 2, channels)).split([shared, 1, 1], -2)
    return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


def split_kv(x: Tensor, groups: int, channels: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """k and v [..., groups, channels] of x [..., 2 · groups · channels]."""
    if interleaved:
        k, v = x.unflatten(-1, (groups, 2, channels)).unbind(-2)
        return k, v
    k, v = x.unflatten(-1, (2 * groups, channels)).split(groups, -2)
    return k, v


class L2Normalization(nn.Module):
    """``x / sqrt(sum(x²) + eps)`` along the last dimension."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return l2_normalized(x, self.eps)[0]


def make_head_norm(kind: str | None, channels: int, eps: float, **options: Any) -> nn.Module | None:
    """The norm of the queries or keys of a head; ``options`` of its parameters, if it has any."""
    match kind:
        case None:
            return None
        case "L2Normalization":
            return L2Normalization(eps)
        case "RMSNorm":
            return RMSNorm(channels, eps, **options)
        case "LayerNorm":
            return LayerNorm(channels, eps, **options)
    raise ValueError(f"qk_norm_type is None, 'L2Normalization', 'RMSNorm' or 'LayerNorm', not {kind!r}")


def by_heads(x: Tensor, channels: int) -> Tensor:
    """[..., heads · channels] -> [..., heads, channels]"""
    heads: Tensor = x.unflatten(-1, (-1, channels))
    return heads


def as_pair(rotary: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Angles for queries and for keys."""
    return (rotary, rotary) if isinstance(rotary, torch.Tensor) else rotary
