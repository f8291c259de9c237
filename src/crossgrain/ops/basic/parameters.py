"""How operations make their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.options import resolved_device

__all__ = ["init_weight", "refuse_parallel_options", "resolved_device"]


def init_weight(weight: Tensor, rng_state_tracker_function: Callable[[], Any] | None) -> None:
    """As `torch.nn.Linear` does, under the tracker's generator if there is one."""
    with torch.no_grad():
        if rng_state_tracker_function is None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            with rng_state_tracker_function().fork():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def refuse_parallel_options(op: Any, mode: str | None, group: Any, sequence_parallel: bool) -> None:
    """One process holds the whole layer."""
    if mode not in (None, "column", "row"):
        raise ValueError(f"{op.layer}: tensor_parallel_mode is None, 'column' or 'row', not {mode!r}")
    ranks = torch.distributed.get_world_size(group) if mode is not None and torch.distributed.is_initialized() else 1
    if sequence_parallel or ranks > 1:
        raise NotImplementedError(
            f"{op.layer}: one process holds the whole layer, so there is no tensor_parallel_mode={mode!r} over "
            f"{ranks} ranks, sequence_parallel={sequence_parallel}; use AllGather and ReduceScatter around it"
        )
