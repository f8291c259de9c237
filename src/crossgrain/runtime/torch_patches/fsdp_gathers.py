"""FSDP2's groups of parameters, made to say what each gather is for.

Why: FSDP2 gathers the same bytes for forward and backward, and tells nobody for which of the two. Quantized weights
read rows in one and columns in the other, so half of the bytes would travel for nothing. The class of a group is
replaced by a subclass that announces the `Purpose` of each gather, and forgets sizes that differ between the passes.

Seen with torch 2.13. `announce_gathers` raises if FSDP2's groups do not have what is used here.
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
    """The passes that a gather serves."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    BOTH = FORWARD | BACKWARD


Announce = Callable[[Purpose], AbstractContextManager[None]]

_NEEDED = ("unshard", "wait_for_unshard", "_to_sharded", "is_sharded", "is_unsharded")
_NEEDED_OF_OBJECTS = ("_training_state", "_all_gather_result", "_reshard_after_forward", "reshard_after_backward")


def announce_gathers(model: nn.Module, announce: Announce | None) -> int:
    """Make the sharded modules of ``model`` gather inside ``announce(purpose)``; None: as FSDP2 does by itself.

    Returns how many sharded modules there are.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in found for group in _groups_of(module)]
    for group in groups:
        if group.is_unsharded:
            raise RuntimeError("gather_by_pass: the parameters of a module are gathered just now; call reshard() first")
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
        f"gather_by_pass: FSDP2 of torch {torch.__version__} is not as crossgrain knows it ({what}). Leave "
        "gather_by_pass out: both directions then travel in every gather."
    )


class _AnnouncingGroup(FSDPParamGroup):
    """Parameters that are gathered together, which say what they are gathered for."""

    _announce: Announce
    _brought = Purpose(0)  # by the last gather
    _will_recompute = False  # the last forward pass was the first of a checkpoint, whose second runs in backward

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
        with self._announce(self._brought):  # a mesh of one rank asks for the bytes here
            super().wait_for_unshard()

    def _purpose(self) -> Purpose:
        state: Any = self._training_state
        if state == TrainingState.PRE_BACKWARD:
            # What stays after backward is there for the next forward, and what is prefetched for a recomputation.
            alone = self.reshard_after_backward and not self._will_recompute
            return Purpose.BACKWARD if alone else Purpose.BOTH
        recomputes = in_backward()  # what follows is a forward and, without another gather, a backward pass
        if state != TrainingState.FORWARD or recomputes:
            return Purpose.BOTH
        self._will_recompute = bool(running_checkpoints().first)
        return Purpose.FORWARD if self._reshard_after_forward else Purpose.BOTH

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
