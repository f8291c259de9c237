"""Split the output of a projection into queries, keys and values, and make the norms of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...gemm.norms import l2_normalized
from ..norm import LayerNorm, RMSNorm


def split_qkv(x: Tensor, heads: int, groups: int, channels: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split x [..., (heads + 2 · groups) · channels] into q [..., heads, channels], k and v [..., groups, channels].

    If interleaved, the queries, the key and the value of a group are next to each other. Otherwise all queries come
    first, then all keys, then all values.
    """
    if not interleaved:
        q, k, v = x.unflatten(-1, (-1, channels)).split([heads, groups, groups], -2)
        return q, k, v
    shared = heads // groups
    q, k, v = x.unflatten(-1, (groups, shared + 2, channels)).split([shared, 1, 1], -2)
    return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


def split_kv(x: Tensor, groups: int, channels: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Split x [..., 2 · groups · channels] into k and v [..., groups, channels]."""
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
    """Make the norm of the queries or keys of a head, or None. ``options`` are those of its parameters."""
    match kind:
        case None:
            return None
        case "L2Normalization":
            return L2Normalization(eps)
        case "RMSNorm":
            return RMSNorm(channels, eps, **options)
        case "LayerNorm":
            return LayerNorm(channels, eps, **options)
    raise ValueError(f"qk_norm_type must be None, 'L2Normalization', 'RMSNorm' or 'LayerNorm', got {kind!r}")


def by_heads(x: Tensor, channels: int) -> Tensor:
    """Reshape [..., heads · channels] to [..., heads, channels]."""
    heads: Tensor = x.unflatten(-1, (-1, channels))
    return heads


def as_pair(rotary: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the angles for queries and for keys."""
    return (rotary, rotary) if isinstance(rotary, torch.Tensor) else rotary
