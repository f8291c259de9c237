"""Gathers that bring only the direction that a pass reads: rows in forward, columns in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ..planes import COLUMNWISE, ROWWISE
from ..runtime.torch_patches.fsdp_gathers import Purpose, announce_gathers
from ..tensor.sharding import gathering


def gather_by_pass(model: nn.Module, enabled: bool = True) -> None:
    """Let FSDP2 gather the rowwise planes of quantized weights in forward and the columnwise ones in backward.

    Call it after ``fully_shard``; it is for ``model`` and all modules inside. Where weights stay gathered between the
    passes (``reshard_after_forward=False``, and the root module unless told otherwise), both come in forward. A layer
    whose backward reads rows - one that is recomputed inside a sharded module, or a recipe with a
    ``backward_override`` - raises when it does: switch it off for that module.

    Args:
        model: A model, some modules of which ``fully_shard`` has sharded.
        enabled: False goes back to gathers that bring both directions.

    Raises:
        ValueError: No module of ``model`` is sharded.
        RuntimeError: The parameters of a module are gathered at this moment.
        NotImplementedError: FSDP2 of the installed torch is not as crossgrain knows it.
    """
    if not announce_gathers(model, _gathering_for if enabled else None):
        raise ValueError(f"gather_by_pass: no module of this {type(model).__name__} is sharded; call fully_shard first")


def _gathering_for(purpose: Purpose) -> AbstractContextManager[None]:
    rows = [ROWWISE] if Purpose.FORWARD in purpose else []
    return gathering([*rows, *([COLUMNWISE] if Purpose.BACKWARD in purpose else [])])
