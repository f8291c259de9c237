"""Functions for recomputation, random states and FSDP that clients call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_tracked: dict[str, Any] = {}


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """A context that clients enter around both passes of their own checkpoint function. It does nothing.

    Recipes without histories need nothing from it. Delayed scaling raises if it runs in backward outside of a
    checkpoint of torch or crossgrain.
    """
    yield


def get_all_rng_states() -> dict[str, Any]:
    """The states that `set_all_rng_states` was given."""
    return dict(_tracked)


def set_all_rng_states(states: dict[str, Any]) -> None:
    _tracked.clear()
    _tracked.update(states)


def graph_safe_rng_available() -> bool:
    """Always False: there are no CUDA graphs."""
    return False


def prepare_te_modules_for_fsdp(fsdp_root: nn.Module) -> None:
    """Check that the model is sharded with FSDP2, which needs no preparation.

    Raises:
        TypeError: no module is sharded with ``fully_shard``.
    """
    if not any(isinstance(module, FSDPModule) for module in fsdp_root.modules()):
        raise TypeError(
            f"prepare_te_modules_for_fsdp: {type(fsdp_root).__name__} has no module that fully_shard has sharded; "
            "crossgrain supports FSDP2 (fully_shard), not FullyShardedDataParallel"
        )
