"""`gather_by_pass`: FSDP2 gathers only the planes that a pass reads, rowwise in forward, columnwise in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ..planes import COLUMNWISE, ROWWISE
from ..runtime.torch_patches.fsdp_gathers import Purpose, announce_gathers
from ..tensor.sharding import gathering


def gather_by_pass(model: nn.Module, enabled: bool = True) -> None:
    """Make FSDP2 gather the rowwise planes of quantized weights in forward and the columnwise planes in backward.

    Call it after ``fully_shard``. Weights that stay gathered between the passes get both planes in forward: with
    ``reshard_after_forward=False``, and in the root module by default.

    Some layers read rowwise planes in backward: those that are recomputed inside a sharded module, and those whose
    recipe has a ``backward_override``. Weights that have only rows, because they were made under such a recipe, are
    gathered by rows in both passes. For others backward raises; call ``gather_by_pass(module, enabled=False)`` for the
    sharded module that contains them.

    Args:
        model: a model with modules that ``fully_shard`` has sharded; all of them are changed.
        enabled: False returns to gathering both planes in each pass.

    Raises:
        ValueError: no module of the model is sharded.
        RuntimeError: parameters are gathered at the moment.
        NotImplementedError: FSDP2 of the installed torch is not as crossgrain knows it.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     model = torch.nn.Sequential(cg.Linear(32, 32))
        >>> cg.distributed.gather_by_pass(fully_shard(model))  # after fully_shard
        >>> torch.distributed.destroy_process_group()
    """
    if not announce_gathers(model, _gathering_for if enabled else None):
        raise ValueError(f"gather_by_pass: no module of this {type(model).__name__} is sharded; call fully_shard first")


def _gathering_for(purpose: Purpose) -> AbstractContextManager[None]:
    rows = [ROWWISE] if Purpose.FORWARD in purpose else []
    return gathering([*rows, *([COLUMNWISE] if Purpose.BACKWARD in purpose else [])])
