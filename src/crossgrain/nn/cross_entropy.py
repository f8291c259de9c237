"""`parallel_cross_entropy`: cross entropy of logits whose classes may be divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives import group_rank, group_size, summed
from ..runtime.derivatives import differentiable_once, entrances
from ..runtime.host_and_device import require


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Compute the cross entropy of targets.

    Args:
        inp: logits, [..., classes / ranks].
        target: the class of each row, [...].
        label_smoothing: part of the probability that is spread evenly over all classes.
        reduce_loss: return the mean over the targets that are not ignored.
        dist_process_group: the ranks among which the classes are divided evenly, in the order of ranks.
        ignore_idx: targets with this value have no loss and no gradient.
        is_cg_capturable: accepted; it has no effect.

    Returns:
        The loss of each target in float32, or their mean.

    Raises:
        ValueError: the shapes do not fit, or a target is not a class.
    """
    if inp.shape[:-1] != target.shape:
        raise ValueError(
            f"parallel_cross_entropy: logits of shape {list(inp.shape)} need targets of shape {list(inp.shape[:-1])}, "
            f"got {list(target.shape)}"
        )
    classes = inp.shape[-1] * group_size(dist_process_group)
    unknown = (target != ignore_idx) & ((target < 0) | (target >= classes))
    rule = f"parallel_cross_entropy: targets must be between 0 and {classes - 1}, or ignore_idx={ignore_idx}"
    require(~unknown.any(), rule, lambda: f"{rule}, got {int(target[unknown][0])}")
    losses: Tensor = _CrossEntropy.apply(inp, target, label_smoothing, dist_process_group, ignore_idx)
    if not reduce_loss:
        return losses
    return losses.sum() / (target != ignore_idx).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float, group: Any, ignored: int) -> Tensor:
        ranks, local = group_size(group), logits.shape[-1]
        wide = logits.detach().to(torch.float32)
        largest = wide.amax(-1, keepdim=True)
        if ranks > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = wide - largest
        exponentials = shifted.exp()
        own = target - group_rank(group) * local
        mine = (own >= 0) & (own < local)
        index = own.clamp(0, local - 1).unsqueeze(-1)
        at_target = torch.where(mine, shifted.gather(-1, index).squeeze(-1), 0.0)
        # One sum over ranks: of exponentials, of logits, and the logit of the target, which one rank has.
        sums = torch.stack((exponentials.sum(-1), shifted.sum(-1), at_target))
        if ranks > 1:
            sums = summed(sums, group)
        normalizer, total, at_target = sums.unbind(0)
        log_normalizer = normalizer.log()
        loss = log_normalizer - at_target
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_normalizer - total / (ranks * local))
        counts = target != ignored
        ctx.smoothing, ctx.classes = smoothing, ranks * local
        ctx.save_for_backward(exponentials / normalizer.unsqueeze(-1), index, mine, counts)
        ctx.dtype = logits.dtype
        ctx.entrances = entrances(logits)
        return torch.where(counts, loss, 0.0)

    @staticmethod
    @differentiable_once("parallel_cross_entropy")
    def backward(ctx: Any, grad: Tensor) -> Any:
        probs, index, mine, counts = ctx.saved_tensors
        dx = probs - ctx.smoothing / ctx.classes
        dx = dx.scatter_add(-1, index, (mine * -(1.0 - ctx.smoothing)).unsqueeze(-1).to(dx.dtype))
        return (dx * (grad * counts).unsqueeze(-1)).to(ctx.dtype), None, None, None, None
