"""Gathers that bring only the direction that a pass reads: rows in forward, columns in backward."""

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
    """Let FSDP2 gather the rowwise planes of quantized weights in forward and the columnwise ones in backward.

    Call it after ``fully_shard``; it is for ``model`` and all modules inside. Where weights stay gathered between the
    passes (``reshard_after_forward=False``, and the root module unless told otherwise), both come in forward. A layer
    whose backward reads rows - one that is recomputed inside a sharded module, or a recipe with a
    ``backward_override`` - raises when it does: switch it off for that module.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError(f"gather_by_pass: no module of this {type(model).__name__} is sharded; call fully_shard first")
    for module in found:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group.is_unsharded:
                raise RuntimeError("gather_by_pass: parameters are gathered just now; call reshard() first")
            group.__class__ = _GroupByPass if enabled else FSDPParamGroup
            _forget_sizes(group)


class _GroupByPass(FSDPParamGroup):
    """Parameters that are gathered together, which say what they are gathered for."""

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
        """Of what an earlier gather brought for another pass: columns, where a forward pass comes after all."""
        if self._all_gather_result is not None:
            work: Any = self._all_gather_result.all_gather_work
            if work is not None:
                work.wait()
            self._all_gather_result = None
        self._to_sharded()


def _forget_sizes(group: FSDPParamGroup) -> None:
    """FSDP2 takes what arrives for as large as it was the last time, and passes differ."""
    for param in group.fsdp_params:
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            param.all_gather_outputs = []
