"""`gather_by_pass`: FSDP2 gathers only the planes that a pass reads, rowwise in forward, columnwise in backward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..planes import COLUMNWISE, ROWWISE, Direction
from ..runtime.checkpoint_frames import in_backward, running_checkpoints
from ..tensor.sharding import gathering

_BOTH = tuple(Direction)


def gather_by_pass(model: nn.Module, enabled: bool = True) -> None:
    """Make FSDP2 gather the rowwise planes of quantized weights in forward and the columnwise planes in backward.

    Call it after ``fully_shard``. Weights that stay gathered between the passes get both planes in forward: with
    ``reshard_after_forward=False``, and in the root module by default.

    Some layers read rowwise planes in backward: those that are recomputed inside a sharded module, and those whose
    recipe has a ``backward_override``. Their backward raises; call ``gather_by_pass(module, enabled=False)`` for the
    sharded module that contains them.

    Args:
        model: a model with modules that ``fully_shard`` has sharded; all of them are changed.
        enabled: False returns to gathering both planes in each pass.

    Raises:
        ValueError: no module of the model is sharded.
        RuntimeError: parameters are gathered at the moment.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError(f"gather_by_pass: no module of this {type(model).__name__} is sharded; call fully_shard first")
    for module in found:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group.is_unsharded:
                raise RuntimeError(
                    "gather_by_pass: the parameters are gathered at the moment; call reshard() on the sharded modules "
                    "first"
                )
            group.__class__ = _GroupByPass if enabled else FSDPParamGroup
            _forget_sizes(group)


class _GroupByPass(FSDPParamGroup):
    """A parameter group of FSDP2 that decides for each gather which planes are needed."""

    _brought: tuple[Direction, ...] = ()  # by the last gather
    _will_recompute = False  # the last forward pass was the first of a checkpoint, whose second runs in backward

    def unshard(self, async_op: bool = False) -> None:
        directions = self._directions()
        if not set(directions) <= set(self._brought):
            self._let_go()
        if self.is_sharded and self._all_gather_result is None:
            self._brought = directions
        with gathering(directions):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._all_gather_result is not None:
            _forget_sizes(self)
        with gathering(self._brought):  # a mesh of one rank asks for the bytes here
            super().wait_for_unshard()

    def _directions(self) -> tuple[Direction, ...]:
        state: Any = self._training_state
        if state == TrainingState.PRE_BACKWARD:
            # What stays after backward is there for the next forward, and what is prefetched for a recomputation.
            return (COLUMNWISE,) if self.reshard_after_backward and not self._will_recompute else _BOTH
        recomputes = in_backward()  # what follows is a forward and, without another gather, a backward pass
        if state != TrainingState.FORWARD or recomputes:
            return _BOTH
        self._will_recompute = bool(running_checkpoints().first)
        return (ROWWISE,) if self._reshard_after_forward else _BOTH

    def _let_go(self) -> None:
        """Drop what an earlier gather brought for another pass."""
        if self._all_gather_result is not None:
            work: Any = self._all_gather_result.all_gather_work
            if work is not None:
                work.wait()
            self._all_gather_result = None
        self._to_sharded()


def _forget_sizes(group: FSDPParamGroup) -> None:
    """Make FSDP2 allocate its outputs anew: it assumes the size of the last gather, but the passes differ in size."""
    for param in group.fsdp_params:
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            param.all_gather_outputs = []
