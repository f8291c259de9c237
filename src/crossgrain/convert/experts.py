"""Fused experts of transformers: one 3-D parameter holds the weights of all experts.

Classes that use transformers' interface for experts (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3 and some sixty others)
say in their attributes how their weights lie: ``is_transposed``, ``has_bias``, ``has_gate``. So one adapter computes
all of them, and transformers itself is not needed to find them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe.projections import LayerAdapter, Multiply, Projection, register_finder

_INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
# How configurations of transformers call the number of experts of a token.
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


class FusedExperts(LayerAdapter):
    """Experts of transformers: forward takes hidden states [tokens, hidden], expert indices and weights [tokens, k]."""

    def projections(self, module: Any) -> Sequence[Projection]:
        used = next((count for key in _USED_EXPERTS if isinstance(count := getattr(module.config, key, None), int)), 1)

        def projection(name: str) -> Projection:
            bias = f"{name}_bias" if module.has_bias else None
            return Projection(name, name, bias, len(getattr(module, name)), module.is_transposed, used)

        return [projection(_up(module)), projection("down_proj")]

    def why_not(self, module: Any) -> str | None:
        for name in (_up(module), "down_proj"):
            weight = getattr(module, name, None)
            if not isinstance(weight, Tensor) or weight.dim() != 3:
                return f"{name} of a {type(module).__name__} is not a parameter [experts, out, in]"
        return None

    def forward(self, module: Any, multiply: Multiply, *args: Any, **kwargs: Any) -> Tensor:
        """Sort tokens by expert, multiply, and add up the results of each token with their weights."""
        # The names of the arguments differ between classes, their order does not.
        given = inspect.signature(module._was[0].forward).bind(module, *args, **kwargs).arguments
        _, hidden, chosen, scores = given.values()
        top_k, experts = chosen.shape[-1], len(getattr(module, _up(module)))
        order = chosen.reshape(-1).argsort(stable=True)
        # Numbers beyond the last expert stand for experts of other ranks. They are sorted to the end and left out.
        sizes = _rows_of_experts(chosen.reshape(-1), experts)
        order = order[: sum(sizes)]
        projected = multiply(_up(module), hidden[order // top_k], sizes=sizes)
        projected = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
        projected = multiply("down_proj", projected, sizes=sizes)
        if getattr(module, "has_post_expert_norm", False):
            projected = module.post_expert_norm(projected)
        weighted = projected * scores.reshape(-1)[order].unsqueeze(-1)
        # Rows go back to their places and are summed there, so the sum does not depend on the order of experts.
        places = weighted.new_zeros((chosen.numel(), weighted.shape[-1])).index_copy(0, order, weighted)
        total: Tensor = places.unflatten(0, (len(hidden), top_k)).sum(1).to(hidden.dtype)
        return total


def _rows_of_experts(chosen: Tensor, experts: int) -> list[int]:
    """How many rows go to each of ``experts``: the only numbers that have to be read from a GPU."""
    counts = torch.zeros(experts + 2, dtype=torch.int64, device=chosen.device)
    places = chosen.to(torch.int64).clamp(-1, experts) + 1
    negative, *sizes, _ = counts.scatter_add_(0, places, torch.ones_like(places)).tolist()
    if negative:
        raise ValueError(f"numbers of experts must not be negative, but {negative} of {len(chosen)} are")
    return sizes


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


_FUSED_EXPERTS = FusedExperts()


def _find(module: nn.Module) -> LayerAdapter | None:
    if not all(hasattr(module, name) for name in (*_INTERFACE, "down_proj")):
        return None
    return _FUSED_EXPERTS


register_finder(_find)
