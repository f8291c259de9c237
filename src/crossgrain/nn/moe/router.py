"""Choose the experts of each token and their probabilities. All computations are in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_TINY = 1e-20  # keeps scores that are all zero from being divided by zero


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: ScoreFunction,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose the ``topk`` experts of each token.

    Args:
        logits: [tokens, experts].
        topk: number of experts per token.
        use_pre_softmax: softmax over all experts before the choice, instead of over the chosen experts after it.
        num_groups: number of groups of experts; used with ``group_topk``.
        group_topk: choose experts only from the ``group_topk`` groups whose best experts have the largest scores.
        scaling_factor: factor of the probabilities.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_bias: added to the scores for the choice, not for the probabilities; not with "softmax".

    Returns:
        The probabilities in the dtype of ``logits``, [tokens, experts], zero for experts that are not chosen; and a
        bool map of the same shape.
    """
    wide = logits.to(torch.float32)
    if score_function == "softmax":
        if expert_bias is not None:
            raise ValueError(
                "expert_bias works only with the score functions sigmoid and sqrtsoftplus, not with softmax"
            )
        scores = torch.softmax(wide, -1) if use_pre_softmax else wide
        chosen = _chosen(scores, topk, num_groups, group_topk)
        probs = scores.gather(-1, chosen)
        if not use_pre_softmax:
            probs = torch.softmax(probs, -1)
    else:
        scores = _scores(wide, score_function)
        ranking = scores if expert_bias is None else scores + expert_bias
        probs = scores.gather(-1, chosen := _chosen(ranking, topk, num_groups, group_topk))
        if topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + _TINY)
    if scaling_factor:
        probs = probs * scaling_factor
    spread = torch.zeros_like(wide).scatter(-1, chosen, probs)
    return spread.to(logits.dtype), _map(wide, chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: ScoreFunction
) -> tuple[Tensor, Tensor]:
    """Return a bool map of the ``topk`` best experts, and the scores of all experts in float32, which sum to 1."""
    wide = logits.to(torch.float32)
    if score_function == "softmax":
        scores = torch.softmax(wide, -1)
    else:
        scores = _scores(wide, score_function)
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return _map(wide, _chosen(scores, topk, None, None)), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """The load-balancing loss ``coeff · E / (k · T²) · Σ_e tokens_e · Σ_t probs_te``, in the dtype of ``probs``."""
    by_expert = probs.to(torch.float32).sum(0)
    loss = torch.sum(by_expert * tokens_per_expert) * (num_experts * coeff / (topk * total_num_tokens**2))
    return loss.to(probs.dtype)


def _scores(logits: Tensor, function: str) -> Tensor:
    if function == "sigmoid":
        return torch.sigmoid(logits)
    if function == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    raise ValueError(f"score_function must be one of softmax, sigmoid and sqrtsoftplus, got {function!r}")


def _chosen(scores: Tensor, topk: int, groups: int | None, group_topk: int | None) -> Tensor:
    """The numbers of the chosen experts, [tokens, topk]."""
    with torch.no_grad():
        if group_topk:
            groups = _checked_groups(scores.shape[-1], topk, groups, group_topk)
            grouped = scores.unflatten(-1, (groups, -1))
            best = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
            inside = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(group_topk, dim=-1).indices, True)
            scores = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(topk, dim=-1).indices


def _checked_groups(experts: int, topk: int, groups: int | None, group_topk: int) -> int:
    if not groups or experts % groups or group_topk > groups:
        raise ValueError(
            f"group_topk={group_topk} groups cannot be chosen from num_groups={groups} groups of {experts} experts: "
            "num_groups must divide the number of experts and be at least group_topk"
        )
    if not group_topk <= topk <= group_topk * (experts // groups):
        raise ValueError(
            f"{topk} experts cannot be chosen from {group_topk} groups of {experts // groups}: groups are ranked by "
            "their topk // group_topk best experts"
        )
    return groups


def _map(like: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, chosen, True)
