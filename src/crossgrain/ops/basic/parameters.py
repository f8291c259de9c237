"""Helpers to create the parameters of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.collectives import group_size
from ...runtime.devices import resolved_device

__all__ = ["init_weight", "resolved_device", "tensor_parallel_ranks"]


def init_weight(weight: Tensor, rng_state_tracker_function: Callable[[], Any] | None) -> None:
    """Initialize a weight like `torch.nn.Linear`, with the random numbers of the tracker if there is one."""
    with torch.no_grad():
        if rng_state_tracker_function is None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            with rng_state_tracker_function().fork():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def tensor_parallel_ranks(op: Any, mode: str | None, group: Any, sequence_parallel: bool) -> tuple[Any, int]:
    """Return the group of ranks that share an operation, by default all ranks, and its size."""
    if mode not in (None, "column", "row"):
        raise ValueError(f"{op.layer}: tensor_parallel_mode must be None, 'column' or 'row', got {mode!r}")
    if mode is None:
        if sequence_parallel:
            raise ValueError(f"{op.layer}: sequence_parallel needs a tensor_parallel_mode, 'column' or 'row'")
        return None, 1
    ranks = group_size(group)
    return (None if ranks == 1 else group or torch.distributed.group.WORLD), ranks
