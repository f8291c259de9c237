"""Collectives along the first dimension. The group None means all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .derivatives import differentiable_once, entrances
from .failures import communicate


def group_size(group: Any = None) -> int:
    """The number of ranks in a group; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def group_rank(group: Any = None) -> int:
    """The index of this rank in a group; 0 if torch.distributed is not initialised."""
    if isinstance(group, AwaitedGroup):
        raise RuntimeError(group.problem)
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def collective_device(group: Any = None) -> torch.device:
    """A device whose tensors a group can communicate: the CPU if it can, otherwise the GPU (NCCL)."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def same_ranks(group: Any, other: Any) -> bool:
    """Whether two groups have the same ranks. None is no group. Groups of equal meshes may be different objects."""
    if group is None or other is None:
        return False
    return group is other or dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


def _either(name: str, old_name: str) -> Callable[..., Any]:
    """A collective by its name since torch 2.13, which warns about the old name; by the old name in older versions."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, old_name)
    return found


def gathered_rows(x: Tensor, group: Any) -> Tensor:
    """The rows of all ranks, one rank after the other. Each rank must have the same number of rows."""
    x = x.detach().contiguous()
    out = x.new_empty(x.shape[0] * group_size(group), *x.shape[1:])
    communicate(_either("all_gather_single", "all_gather_into_tensor"), out, x, group=group)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    communicate(dist.all_reduce, out, group=group)
    return out


class AwaitedGroup:
    """Stands for a process group that is not known yet: communicating over it raises RuntimeError.

    Args:
        problem: the message of the error.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem


def joined_groups(*groups: Any) -> Any:
    """Combine groups for `maximise_`: one group, or a tuple of different groups. None is left out."""
    found: list[Any] = []
    for group in groups:
        members = group if isinstance(group, tuple) else (group,)
        found += [member for member in members if member is not None and all(member is not other for other in found)]
    return found[0] if len(found) == 1 else tuple(found) or None


def without_group(groups: Any, group: Any) -> Any:
    """Remove a group from the result of `joined_groups`."""
    members = groups if isinstance(groups, tuple) else (groups,)
    return joined_groups(*(member for member in members if member is not group))


def maximise_(x: Tensor, group: Any) -> None:
    """Replace numbers by the largest over ranks, in place. ``group`` may be a tuple of groups, reduced one by one."""
    for each in group if isinstance(group, tuple) else (group,):
        if isinstance(each, AwaitedGroup):
            raise RuntimeError(each.problem)
        communicate(dist.all_reduce, x, op=dist.ReduceOp.MAX, group=each)


def maximised(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The largest numbers over ranks for each of several tensors, in one collective."""
    if not tensors:
        return []
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    maximise_(packed, group)
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def scattered_sum(x: Tensor, group: Any, layer: str) -> Tensor:
    """The sum over ranks, of which each rank gets an equal share of the rows.

    Raises:
        ValueError: the rows cannot be divided evenly; ``layer`` is named in the message.
    """
    ranks = group_size(group)
    if x.dim() == 0 or x.shape[0] % ranks:
        raise ValueError(f"{layer}: {x.shape[0] if x.dim() else 0} rows cannot be divided evenly among {ranks} ranks")
    out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    collective = _either("reduce_scatter_single", "reduce_scatter_tensor")
    communicate(collective, out, x.detach().contiguous(), group=group)
    return out


def gathered_with_gradient(x: Tensor, group: Any) -> Tensor:
    """`gathered_rows` with autograd: the gradients of a row from all ranks are summed on the rank that has the row."""
    out: Tensor = _Gather.apply(x, group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.entrances = group, entrances(x)
        return gathered_rows(x, group)

    @staticmethod
    @differentiable_once("rows that are gathered from other ranks")
    def backward(ctx: Any, dy: Tensor) -> Any:
        return scattered_sum(dy, ctx.group, "gathered rows"), None


def exchanged_with_gradient(x: Tensor, group: Any) -> Tensor:
    """Send ``x[i]`` to rank i, and return what all ranks have sent here, [ranks, ...]. Gradients go back."""
    out: Tensor = _Exchange.apply(x, group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        communicate(dist.all_to_all_single, out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchange.apply(grads[0], ctx.group), None


def passed_on(x: Tensor, group: Any) -> Tensor:
    """Send ``x`` to the next rank of a ring, and return what the rank before has sent."""
    ranks, at = dist.get_process_group_ranks(group), group_rank(group)
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    communicate(_send_and_receive, x, after, out, before, group=group)
    return out


def _send_and_receive(x: Tensor, to: int, out: Tensor, source: int, group: Any) -> None:
    both = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
