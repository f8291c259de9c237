"""The end of a step of delayed scaling: amaxes are reduced over ranks, histories roll, scales change.

A `Step` collects the states that ran in one forward region or one backward pass, and ends them together: one
reduction for all that share a group. Steps hold states weakly; a module that is gone needs no update.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives import maximise_
from .delayed_state import DelayedScalingRecipeState
from .roles import QuantizerRole
from .state import RecipeState


@dataclass(frozen=True)
class _Ran:
    state: weakref.ref[DelayedScalingRecipeState]
    group: Any
    seen_before: Tensor  # [n], row 0 of the history when the step began


class Step:
    """The delayed-scaling states that ran since it was opened, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ran: list[_Ran] = []
        self._closed = False
        self._first_module = True
        self.aborted = False
        self.layers_ran = False
        self.roles: set[QuantizerRole] | None = None  # of the layers that ran, if somebody wants to know

    def add(self, state: RecipeState, group: Any = None) -> None:
        """Note that ``state`` is about to be used. Does nothing for recipes without histories."""
        delayed = state.delayed
        if delayed is None:
            return
        with self._lock:
            known = any(ran.state() is delayed for ran in self._ran)
            if not known and not self._closed:
                self._ran.append(_Ran(weakref.ref(delayed), group, delayed.amax_history[0].clone()))

    def take_first(self) -> bool:
        """True for the first caller only."""
        with self._lock:
            first, self._first_module = self._first_module, False
        return first

    def end(self) -> None:
        """Update all states that ran, and forget them."""
        ran = self._taken()
        reduced = _reduced_amaxes(ran)
        for state, _ in ran:
            state.end_step(reduced.get(id(state)))

    def undo(self) -> None:
        """Forget the step: the states have seen nothing."""
        with self._lock:
            ran, self._ran = self._ran, []
        for entry in reversed(ran):
            state = entry.state()
            if state is not None:
                with torch.no_grad():
                    state.amax_history[0].copy_(entry.seen_before)

    def close(self) -> None:
        """Take no more states: what runs later belongs to another step."""
        self._closed = True

    def _taken(self) -> list[tuple[DelayedScalingRecipeState, Any]]:
        """States and groups, a history only once: of states that share one, the last counts."""
        with self._lock:
            ran, self._ran = self._ran, []
        taken: list[tuple[DelayedScalingRecipeState, Any]] = []
        for entry in ran:
            state = entry.state()
            if state is not None:
                taken = [(other, group) for other, group in taken if not _shares_history(other, state)]
                taken.append((state, entry.group))
        return taken


def _shares_history(one: DelayedScalingRecipeState | None, other: DelayedScalingRecipeState) -> bool:
    return one is not None and one.amax_history is other.amax_history


def _reduced_amaxes(ran: list[tuple[DelayedScalingRecipeState, Any]]) -> dict[int, Tensor]:
    """Amaxes of this step maximised over ranks, by id of the state, with one reduction per group.

    Nothing is written before all ranks are known to reduce the same tensors.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    buckets: dict[tuple[int, torch.device], tuple[Any, list[DelayedScalingRecipeState]]] = {}
    for state, group in ran:
        if state.recipe.reduce_amax and dist.get_world_size(group) > 1:
            buckets.setdefault((id(group), state.device), (group, []))[1].append(state)
    reduced: dict[int, Tensor] = {}
    for group, states in buckets.values():
        _refuse_different_layouts(group, states)
        packed = torch.cat([state.amax_history[0] for state in states])
        maximise_(packed, group)
        pieces = packed.split([state.num_quantizers for state in states])
        reduced |= {id(state): piece for state, piece in zip(states, pieces, strict=True)}
    return reduced


def _refuse_different_layouts(group: Any, states: list[DelayedScalingRecipeState]) -> None:
    """A reduction of unequal lengths hangs or mixes up tensors; this one raises, on every rank."""
    layout = ",".join(f"{state.mode}:{state.num_quantizers}" for state in states)
    checksum = zlib.crc32(layout.encode())
    bounds = torch.tensor([checksum, -checksum], dtype=torch.int64, device=states[0].device)
    maximise_(bounds, group)
    if bounds[0].item() != -bounds[1].item():
        raise RuntimeError(
            "delayed scaling: the ranks of the amax reduction group ran different modules in this step "
            f"(here {len(states)} states with {sum(state.num_quantizers for state in states)} tensors); every rank "
            "has to run the same modules in the same order, or the recipe needs reduce_amax=False"
        )


class BackwardSteps:
    """A step for every backward pass under way, ended when the pass is complete and forgotten if it fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, Step] = {}

    def current(self) -> Step:
        """The step of the backward pass that is running."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            known = task in self._steps
            step = self._steps.setdefault(task, Step())
        if not known and task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(_EndOfPass(self, task))
        return step

    def _end(self, task: int) -> None:
        with self._lock:
            step = self._steps.pop(task, None)
        if step is not None:
            step.end()

    def _forget(self, task: int) -> None:
        with self._lock:
            step = self._steps.pop(task, None)
        if step is not None:
            step.undo()

    def end_all(self) -> None:
        """End every step now, for callers that do not run in the autograd engine."""
        with self._lock:
            tasks = list(self._steps)
        for task in tasks:
            self._end(task)

    def clear(self) -> None:
        with self._lock:
            self._steps.clear()


class _EndOfPass:
    """Called by the autograd engine when a pass is complete; let go of without a call if it fails."""

    def __init__(self, steps: BackwardSteps, task: int) -> None:
        self._steps = steps
        self._task = task

    def __call__(self) -> None:
        self._steps._end(self._task)

    def __del__(self) -> None:
        self._steps._forget(self._task)


backward_steps = BackwardSteps()
