"""Random states in a sharded checkpoint. Each rank saves its own.

They can be restored only by the number of ranks that saved them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..files.random_state import get_random_state, set_random_state
from ..runtime.collectives import group_rank, group_size
from .state_tree import Tensors

RANDOM = "random"


def take_random_state(tensors: Tensors) -> list[int]:
    """Add this rank's random states to the tensors it writes. Return the number of bytes of each rank."""
    buffer = io.BytesIO()
    torch.save(get_random_state(), buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    tensors[_name()] = mine
    sizes: list[Any] = [mine.numel()] * group_size()
    if dist.is_initialized():
        dist.all_gather_object(sizes, mine.numel())
    return sizes


def expect_random_state(manifest: Mapping[str, Any], wanted: bool | None, tensors: Tensors) -> Callable[[], None]:
    """Add an empty tensor for this rank's random states. Call the returned function when it has been read.

    Args:
        wanted: whether to restore; None restores if the number of ranks is the same as when saving.
    """
    sizes = manifest.get(RANDOM, [])
    if not wanted and (wanted is False or len(sizes) != group_size()):
        return lambda: None
    if len(sizes) != group_size():
        raise ValueError(
            f"the checkpoint has random states of {len(sizes)} ranks, but it is loaded by {group_size()}; pass "
            "random_state=False or None"
        )
    mine = tensors[_name()] = torch.empty(sizes[group_rank()], dtype=torch.uint8, device="cpu")
    return lambda: set_random_state(torch.load(io.BytesIO(mine.numpy().tobytes()), weights_only=True))


def _name() -> str:
    return f"{RANDOM}.{group_rank()}"
