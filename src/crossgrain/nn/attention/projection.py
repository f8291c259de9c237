"""Split the output of a projection into queries, keys and values, and make the norms of heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...gemm.norms import l2_normalized
from ..norm import LayerNorm, RMSNorm


class Heads(NamedTuple):
    """The heads of a rank.

    Attributes:
        heads: number of heads of queries.
        groups: number of heads of keys and values.
        qk: channels of queries and keys.
        v: channels of values.
    """

    heads: int
    groups: int
    qk: int
    v: int


def split_qkv(x: Tensor, sizes: Heads, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split x [..., heads · qk + groups · (qk + v)] into q [..., heads, qk], k [..., groups, qk], v [..., groups, v].

    If interleaved, the queries, the key and the value of a group are next to each other. Otherwise all queries come
    first, then all keys, then all values.
    """
    shared = sizes.heads // sizes.groups
    q, k, v = _split(x, [shared * sizes.qk, sizes.qk, sizes.v], sizes.groups, interleaved)
    return by_heads(q.flatten(-2), sizes.qk), k, v


def split_kv(x: Tensor, sizes: Heads, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Split x [..., groups · (qk + v)] into k [..., groups, qk] and v [..., groups, v]."""
    k, v = _split(x, [sizes.qk, sizes.v], sizes.groups, interleaved)
    return k, v


def _split(x: Tensor, channels: list[int], groups: int, interleaved: bool) -> list[Tensor]:
    """Split x into parts [..., groups, channels]."""
    if interleaved:
        return list(x.unflatten(-1, (groups, -1)).split(channels, -1))
    return [part.unflatten(-1, (groups, -1)) for part in x.split([groups * each for each in channels], -1)]


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
