"""The end of a step of delayed scaling: reduce amaxes over ranks, update histories and scales.

A `Step` collects the states that ran in one forward region or in one backward pass, and updates them together, with
one reduction per process group. It holds weak references to them: a module that was deleted needs no update.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.collectives import maximise_
from ..runtime.host_and_device import on_device, require
from .delayed_state import DelayedScalingRecipeState
from .roles import QuantizerRole
from .state import RecipeState


@dataclass(frozen=True)
class _Ran:
    state: weakref.ref[DelayedScalingRecipeState]
    group: Any
    seen_before: Tensor  # [n], row 0 of the history when the step began


class Step:
    """The delayed-scaling states that ran since the step began, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ran: list[_Ran] = []
        self._closed = False
        self._first_module = True
        self.aborted = False
        self.layers_ran = False
        self.roles: set[QuantizerRole] | None = None  # of layers that ran for the first time, if somebody wants to know

    def add(self, state: RecipeState, group: Any = None) -> None:
        """Record that ``state`` is about to be used. Does nothing for recipes without histories."""
        delayed = state.delayed
        if delayed is None:
            return
        with self._lock:
            known = any(ran.state() is delayed for ran in self._ran)
            if not known and not self._closed:
                self._ran.append(_Ran(weakref.ref(delayed), group, delayed.amax_history[0].clone()))

    def take_first(self) -> bool:
        """Return True for the first caller only."""
        with self._lock:
            first, self._first_module = self._first_module, False
        return first

    def end(self) -> None:
        """Update all states that ran, and remove them from the step."""
        ran = self._taken()
        reduced = _reduced_amaxes(ran)
        for state, _ in ran:
            state.end_step(reduced.get(id(state)))

    def undo(self) -> None:
        """Drop the step: the amaxes that the states recorded in it are removed."""
        with self._lock:
            ran, self._ran = self._ran, []
        for entry in reversed(ran):
            state = entry.state()
            if state is not None:
                with torch.no_grad():
                    state.amax_history[0].copy_(entry.seen_before)

    def close(self) -> None:
        """Accept no more states: what runs later belongs to another step."""
        self._closed = True

    def _taken(self) -> list[tuple[DelayedScalingRecipeState, Any]]:
        """The states and their groups. Of states that share a history, only the last one."""
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
    """The largest amaxes of this step over ranks, by id of the state, with one reduction per group.

    Nothing is written before it is known that all ranks reduce the same tensors.
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
    """Raise on every rank if ranks have different tensors: a reduction of different lengths would hang or mix them."""
    layout = ",".join(f"{state.mode}:{state.num_quantizers}" for state in states)
    checksum = zlib.crc32(layout.encode())
    bounds = on_device([checksum, -checksum], states[0].device, torch.int64)
    maximise_(bounds, group)
    problem = (
        "delayed scaling: the ranks of the amax reduction group ran different modules in this step "
        f"(this rank: {len(states)} states with {sum(state.num_quantizers for state in states)} tensors). Every "
        "rank must run the same modules in the same order; otherwise set reduce_amax=False in the recipe"
    )
    require(bounds[0] == -bounds[1], problem, partial(str, problem), RuntimeError)


class BackwardSteps:
    """The steps of all running backward passes. A step ends when its pass is complete, and is dropped if it fails."""

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
        """Drop all steps without an update."""
        with self._lock:
            self._steps.clear()


class _EndOfPass:
    """The autograd engine calls it when a pass is complete, and deletes it without a call if the pass fails."""

    _steps: BackwardSteps | None = None  # an exception of a signal's handler may come before `__init__`

    def __init__(self, steps: BackwardSteps, task: int) -> None:
        self._task = task
        self._steps = steps

    def __call__(self) -> None:
        if self._steps is not None:
            self._steps._end(self._task)

    def __del__(self) -> None:
        if self._steps is not None:
            self._steps._forget(self._task)


backward_steps = BackwardSteps()
