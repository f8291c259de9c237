"""Make FSDP2's groups of parameters say for which pass they gather.

Why: FSDP2 gathers the same bytes for forward and backward, and does not say for which of them. Forward reads rowwise
planes of quantized weights and backward columnwise planes, so half of the bytes would be sent for nothing. The class of
a group is replaced by a subclass that announces the `Purpose` of each gather, and drops cached sizes, which differ
between the passes.

Tested with torch 2.13. `announce_gathers` raises if FSDP2's groups do not have the attributes that are used here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from .checkpoint_frames import in_backward, running_checkpoints


class Purpose(enum.Flag):
    """The passes for which parameters are gathered."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    BOTH = FORWARD | BACKWARD


Announce = Callable[[Purpose], AbstractContextManager[None]]

_NEEDED = ("unshard", "wait_for_unshard", "_to_sharded", "is_sharded", "is_unsharded")
_NEEDED_OF_OBJECTS = ("_training_state", "_all_gather_result", "_reshard_after_forward", "reshard_after_backward")


def announce_gathers(model: nn.Module, announce: Announce | None) -> int:
    """Make the sharded modules of a model gather inside a context that is told the purpose.

    Args:
        model: the model.
        announce: a function that returns the context manager for a purpose. None restores what FSDP2 does by default.

    Returns:
        The number of sharded modules.

    Raises:
        RuntimeError: parameters of a module are gathered at the moment.
        NotImplementedError: FSDP2 of this version of torch is not as expected.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in found for group in _groups_of(module)]
    for group in groups:
        if group.is_unsharded:
            raise RuntimeError("gather_by_pass: the parameters of a module are gathered now; call reshard() first")
    for group in groups:
        group.__class__ = FSDPParamGroup if announce is None else _AnnouncingGroup
        group._announce = announce
        _forget_sizes(group)
    return len(found)


def _groups_of(module: FSDPModule) -> list[Any]:
    try:
        groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    except AttributeError as error:
        raise _does_not_fit(str(error)) from error
    for group in groups:
        missing = [name for name in _NEEDED if not hasattr(FSDPParamGroup, name)]
        missing += [name for name in _NEEDED_OF_OBJECTS if not hasattr(group, name)]
        if missing:
            raise _does_not_fit(f"FSDPParamGroup has no {', '.join(missing)}")
    return groups


def _does_not_fit(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"gather_by_pass does not work with FSDP2 of torch {torch.__version__} ({what}). Do not call gather_by_pass: "
        "every gather then sends both directions."
    )


class _AnnouncingGroup(FSDPParamGroup):
    """A group of parameters that are gathered together, which announces the purpose of each gather."""

    _announce: Announce
    _brought = Purpose(0)  # the purpose of the last gather
    _will_recompute = False  # the last forward pass was in a checkpoint, which is recomputed in backward

    def unshard(self, async_op: bool = False) -> None:
        purpose = self._purpose()
        if purpose not in self._brought:
            self._let_go()
        if self.is_sharded and self._all_gather_result is None:
            self._brought = purpose
        with self._announce(purpose):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._all_gather_result is not None:
            _forget_sizes(self)
        with self._announce(self._brought):  # with one rank, FSDP2 asks for the bytes here
            super().wait_for_unshard()

    def _purpose(self) -> Purpose:
        state: Any = self._training_state
        if state == TrainingState.PRE_BACKWARD:
            # Parameters that stay after backward are used in the next forward, prefetched ones in a recomputation.
            alone = self.reshard_after_backward and not self._will_recompute
            return Purpose.BACKWARD if alone else Purpose.BOTH
        recomputes = in_backward()  # a forward pass follows and then, without another gather, a backward pass
        if state != TrainingState.FORWARD or recomputes:
            return Purpose.BOTH
        self._will_recompute = bool(running_checkpoints().first)
        return Purpose.FORWARD if self._reshard_after_forward else Purpose.BOTH

    def _let_go(self) -> None:
        """Free what an earlier gather brought for another pass: columnwise planes, if a forward pass follows."""
        if self._all_gather_result is not None:
            work: Any = self._all_gather_result.all_gather_work
            if work is not None:
                work.wait()
            self._all_gather_result = None
        self._to_sharded()


def _forget_sizes(group: FSDPParamGroup) -> None:
    """Drop cached sizes: FSDP2 assumes that a gather has the size of the last one, but sizes differ between passes."""
    for param in group.fsdp_params:
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            param.all_gather_outputs = []
