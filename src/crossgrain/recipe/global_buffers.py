"""Scales and histories that clients register by hand, under the keys of Transformer Engine's global buffers.

Modules of crossgrain need no registration: a step collects the states that run in it (`updates`). States that a client
registers are updated in addition, whenever it calls ``FP8GlobalStateManager.reduce_and_update_fp8_tensors``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..runtime.collectives import maximise_
from .base import Recipe
from .delayed_state import DelayedScalingRecipeState
from .state import RecipeState
from .updates import Step

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
_INDEX = "buffer_index_and_autocast_key"
_PLACE = "global_fp8_buffer_pos_fwd_recompute"
_UPDATED = ("updated_amax_history_fwd", "updated_scale_fwd")


class Registered:
    """States with histories, by key, in the order of their registration. They are kept until they are forgotten."""

    def __init__(self) -> None:
        self._states: dict[str, list[tuple[DelayedScalingRecipeState, Any]]] = {}
        self.first_passes: list[deque[tuple[Tensor, Tensor]]] = []

    def add(self, key: str, state: DelayedScalingRecipeState, group: Any) -> int:
        """Register a state, and return its index below ``key``."""
        states = self._states.setdefault(key, [])
        states.append((state, group))
        return len(states) - 1

    def join(self, step: Step, *, forward: bool) -> None:
        """Add all states of one direction to a step."""
        for key, states in self._states.items():
            if BufferNames.split_key_in_buffer(key)[0] == forward:
                for state, group in states:
                    step.add(state, group)

    def tensors(self, name: str) -> dict[str, list[Tensor]]:
        """The scales, histories, or amaxes of this step, by key: ``name`` is scale, amax_history or amax."""
        return {
            key: [state.amax_history[0] if name == "amax" else getattr(state, name) for state, _ in states]
            for key, states in self._states.items()
        }


class BufferNames:
    """The names of states in ``fp8_meta`` of a module, and of histories in the global buffers."""

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of the state of one pass in ``fp8_meta``."""
        return FORWARD if forward else BACKWARD

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """The key in ``fp8_meta`` of what `add_fp8_tensors_to_global_buffer` has registered: [index, key, ...]."""
        return _INDEX

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """A text that is equal for equal recipes and the same process group."""
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """The key of histories that are updated together."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Whether a key of `get_key_in_buffer` is for the forward pass, and the key of its autocast."""
        direction, _, autocast_key = key.partition("_")
        return direction == "forward", autocast_key

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: Any) -> None:
        """Replace each number by the largest one over the ranks of a group. Nothing is done without ranks."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            maximise_(tensor, group)


def register(fp8_meta: dict[str, Any], registered: Registered) -> None:
    """Register the histories of a module, once. Nothing is done for recipes without histories."""
    states = {forward: delayed_in(fp8_meta, BufferNames.get_meta_tensor_key(forward)) for forward in (True, False)}
    if _INDEX in fp8_meta or all(state is None for state in states.values()):
        return
    group, places = fp8_meta.get("fp8_group"), []
    for forward, state in states.items():
        if state is not None:
            key = BufferNames.get_key_in_buffer(forward, state.recipe, group)
            places += [registered.add(key, state, group), key]
    fp8_meta[_INDEX] = places


def delayed_in(fp8_meta: dict[str, Any], key: str) -> DelayedScalingRecipeState | None:
    """The scales and histories of one pass in ``fp8_meta``; None if there are none."""
    state = fp8_meta.get(key)
    return state.delayed if isinstance(state, RecipeState) else None


def keep_first_pass(fp8_meta: dict[str, Any], registered: Registered) -> None:
    """Remember history and scale before the first pass of a checkpoint, for the recomputation."""
    state = delayed_in(fp8_meta, FORWARD)
    if state is None:
        return
    if _PLACE not in fp8_meta:
        registered.first_passes.append(deque())
        fp8_meta[_PLACE] = len(registered.first_passes) - 1
    registered.first_passes[fp8_meta[_PLACE]].append((state.amax_history.clone(), state.scale.clone()))


@torch.no_grad()
def return_to_first_pass(fp8_meta: dict[str, Any], registered: Registered) -> None:
    """Use the oldest history and scale of `keep_first_pass`. `leave_first_pass` undoes it."""
    state = delayed_in(fp8_meta, FORWARD)
    if state is None:
        return
    waiting = registered.first_passes[fp8_meta[_PLACE]] if _PLACE in fp8_meta else ()
    if not waiting:
        raise RuntimeError(
            "the scales of the first pass were not kept: call copy_forward_fp8_meta_tensors_for_recompute before the "
            "first pass, once for each recomputation"
        )
    history, scale = waiting.popleft()
    fp8_meta.update(zip(_UPDATED, (state.amax_history.clone(), state.scale.clone()), strict=True))
    state.amax_history.copy_(history)
    state.scale.copy_(scale)


@torch.no_grad()
def leave_first_pass(fp8_meta: dict[str, Any]) -> None:
    """Use the newest history and scale again, after a recomputation."""
    state = delayed_in(fp8_meta, FORWARD)
    if state is None:
        return
    if not all(name in fp8_meta for name in _UPDATED):
        raise RuntimeError(
            "there are no newest scales to restore: call get_old_fp8_meta_tensors_for_recompute before the "
            "recomputation"
        )
    history, scale = (fp8_meta.pop(name) for name in _UPDATED)
    state.amax_history.copy_(history)
    state.scale.copy_(scale)
