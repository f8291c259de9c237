"""Random states and recomputation, as clients handle them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_tracked: dict[str, Any] = {}


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Around both passes of a client's own checkpoint.

    What may be recomputed by it needs nothing that is noted here; delayed scaling, which does, refuses to run in
    backward outside of checkpoints that are known.
    """
    yield


def get_all_rng_states() -> dict[str, Any]:
    """States of trackers that graphs capture."""
    return dict(_tracked)


def set_all_rng_states(states: dict[str, Any]) -> None:
    _tracked.clear()
    _tracked.update(states)


def graph_safe_rng_available() -> bool:
    """There are no graphs."""
    return False


def prepare_te_modules_for_fsdp(fsdp_root: nn.Module) -> None:
    """With FSDP2 there is nothing to prepare: weights, gathered or not, are quantized where they are used."""
    if not any(isinstance(module, FSDPModule) for module in fsdp_root.modules()):
        raise TypeError(
            f"prepare_te_modules_for_fsdp: {type(fsdp_root).__name__} has no module that fully_shard has sharded; "
            "FullyShardedDataParallel is not supported"
        )
