"""What ranks have to agree about before a checkpoint is written or read: all of them raise, or none."""

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
    """Only one rank writes what several have, so all of these have to hold the same."""
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
                    f"{key[0]}: rank {rank} holds something else than rank {holder}, which has the same part of it; a "
                    "checkpoint has one value for all ranks"
                )


def _shared_part(tensor: Any) -> tuple[int, ...] | None:
    """Which part of it this rank and others have, by its places in the mesh; None if no other rank has it."""
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
    """What ``work`` returns on the first rank; what it raises there is raised on all."""
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
    """Raise on all ranks if one has a problem: those who go on would wait for it."""
    if dist.is_initialized():
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, None if problem is None else str(problem))
        for rank, other in enumerate(problems):
            if other is not None and problem is None:
                problem = RuntimeError(f"rank {rank}: {other}")
    if problem is not None:
        raise problem
