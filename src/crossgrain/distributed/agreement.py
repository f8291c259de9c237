"""Checks before a sharded checkpoint is written or read, so that either all ranks raise an error or none does."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor.sharding import cut_along, is_sharded, local_part
from .state_tree import Tensors


def check_agreement(tensors: Tensors, content: Mapping[str, Any]) -> None:
    """Raise if ranks that hold the same part of a tensor hold different values of it.

    Only one of these ranks writes that part, so their values must be equal.
    """
    if not dist.is_initialized():
        return
    mine = {
        (name, part): _checksum(tensor)
        for name, tensor in tensors.items()
        if (part := _shared_part(tensor)) is not None
    }
    mine["what is to be saved", ()] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    first: dict[Any, tuple[int, int]] = {}  # who has it, and its checksum
    for rank, other in enumerate(theirs):
        for key, checksum in other.items():
            holder, known = first.setdefault(key, (rank, checksum))
            if checksum != known:
                raise ValueError(
                    f"{key[0]}: rank {rank} and rank {holder} hold the same part of it with different values, but a "
                    "checkpoint stores one value. Make the ranks agree, for example by a broadcast, before saving"
                )


def _shared_part(tensor: Any) -> tuple[int, ...] | None:
    """The part of the tensor that this rank shares with others, as mesh coordinates; None if no other rank has it."""
    if not is_sharded(tensor):
        return ()
    cut = [at for at, placement in enumerate(tensor.placements) if cut_along(placement) is not None]
    if math.prod(tensor.device_mesh.size(at) for at in cut) == dist.get_world_size():
        return None
    return tuple(tensor.device_mesh.get_local_rank(at) for at in cut)


def _checksum(tensor: Tensor) -> int:
    data = local_part(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Run ``work`` on the first rank only. All ranks return its result, or raise its error."""
    if not dist.is_initialized():
        return work()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = work()
        except Exception as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]


def raise_together(problem: Exception | None) -> None:
    """Raise on all ranks if one rank has a problem; otherwise the others would wait for it forever."""
    if dist.is_initialized():
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, None if problem is None else str(problem))
        for rank, other in enumerate(problems):
            if other is not None and problem is None:
                problem = RuntimeError(f"rank {rank}: {other}")
    if problem is not None:
        raise problem
