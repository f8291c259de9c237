"""How operations make their parameters."""

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
    """As `torch.nn.Linear` does, under the tracker's generator if there is one."""
    with torch.no_grad():
        if rng_state_tracker_function is None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            with rng_state_tracker_function().fork():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def tensor_parallel_ranks(op: Any, mode: str | None, group: Any, sequence_parallel: bool) -> tuple[Any, int]:
    """The group that shares an operation, by default all ranks, and its size; one without a mode."""
    if mode not in (None, "column", "row"):
        raise ValueError(f"{op.layer}: tensor_parallel_mode is None, 'column' or 'row', not {mode!r}")
    if mode is None:
        if sequence_parallel:
            raise ValueError(f"{op.layer}: sequence_parallel needs a tensor_parallel_mode")
        return None, 1
    ranks = group_size(group)
    return (None if ranks == 1 else group or torch.distributed.group.WORLD), ranks
