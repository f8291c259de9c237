"""The contexts that say which recipe is in force: around a forward pass, and around a model's construction.

    with autocast(recipe=MXFP8BlockScaling()):
        loss = model(x).sum()
    loss.backward()

Contexts are per thread and per task: what one thread enters, others do not see.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch

from ..runtime.passes import Pass, current_pass, find_pass, replayed_tape, within
from ..runtime.torch_patches.checkpoint_frames import in_backward
from .base import Recipe
from .coerce import as_recipe
from .delayed_state import DelayedScalingRecipeState
from .model_calls import leave_abandoned_calls
from .state import RecipeState
from .support import check_recipe_support, get_default_recipe
from .unused import expect_layers, warn_of_unused
from .updates import Step, backward_steps

RecipeLike = Recipe | str | os.PathLike[str] | None


@dataclass(frozen=True)
class PrecisionContext:
    """What is in force.

    ``step``   collects the states of the outermost enabled autocast
    ``depth``  counts autocasts
    ``task``   the backward pass in which it was entered, -1 if in none
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    quantized_parameters: bool = False
    preserve_init_value: bool = False
    step: Step | None = None
    depth: int = 0
    task: int = -1


_NOTHING = PrecisionContext()
_active: ContextVar[PrecisionContext] = ContextVar("crossgrain_precision", default=_NOTHING)


def active() -> PrecisionContext:
    """The context in force; in a recomputation that of the first pass, whatever backward was called in."""
    context, task = _active.get(), torch._C._current_graph_task_id()
    if task in (-1, context.task):
        return context
    tape = replayed_tape()
    return context if tape is None else tape.outside


def this_pass() -> Pass:
    """What the running code is part of, if there are checkpoints around it."""
    return find_pass(active())


def activate(context: PrecisionContext) -> None:
    """Put a context in force as it is; whoever does so restores the one before."""
    _active.set(context)


def active_recipe() -> Recipe:
    """The recipe in force; the default one if none is."""
    recipe = active().recipe
    return get_default_recipe() if recipe is None else recipe


def forward_step(state: RecipeState) -> AbstractContextManager[None]:
    """Around all that a module's forward quantizes.

    Delayed scaling is updated when the outermost autocast ends; where there is none, the forward is a step. What is
    computed again in backward uses the scales of the first pass, and is no step.
    """
    this = this_pass()
    if state.delayed is not None:
        return _delayed_step(state, state.delayed, this)
    return within(this)


@contextmanager
def _delayed_step(state: RecipeState, delayed: DelayedScalingRecipeState, this: Pass) -> Iterator[None]:
    if not this.recomputes and in_backward() and torch.is_grad_enabled():
        raise RuntimeError(
            "delayed scaling runs in backward, outside of all checkpoints that are known: a recomputation needs the "
            "scales of its first pass. Use crossgrain.checkpoint or torch.utils.checkpoint.checkpoint, and neither "
            "in a compiled function"
        )
    with within(this):
        scale = this.same(delayed.key, lambda: delayed.scale.clone() if this.recorded else delayed.scale)
        if this.recomputes:
            _join_backward_step(this)
            with delayed.replaying(scale):
                yield
        else:
            with one_step():
                context = active()
                assert context.step is not None
                context.step.add(state, context.group)
                yield


@contextmanager
def forward_part(state: RecipeState) -> Iterator[None]:
    """Inside a `forward_step` of ``state``, around a part of it that is a checkpoint of its own."""
    this, delayed = this_pass(), state.delayed
    if delayed is None:
        with within(this):
            yield
        return
    part = this.beyond(current_pass())
    with within(this):
        scale = part.same(delayed.key, delayed.scale.clone)
        with delayed.replaying(scale) if part.recomputes else nullcontext():
            yield


@contextmanager
def one_step() -> Iterator[None]:
    """All forward passes inside are one step of delayed scaling, unless they are part of a larger one already."""
    context = active()
    if context.step is not None or this_pass().recomputes:
        yield
        return
    outer, step = _active.get(), Step()
    activate(replace(context, step=step))
    try:
        yield
    except BaseException:
        step.aborted = True
        raise
    finally:
        activate(outer)
        _finish(step)


def _finish(step: Step, *, always: bool = False) -> None:
    """End a forward step, or forget it: if no backward pass will follow, after an error, or in backward."""
    step.close()
    if (always or this_pass().trains) and not in_backward() and not step.aborted:
        step.end()
    else:
        step.undo()


def backward_note(state: RecipeState) -> Callable[[], None]:
    """What backward calls before it quantizes; ``state`` is updated when the backward pass is complete."""
    group, step = active().group, _join_backward_step(this_pass())

    def note() -> None:
        (step or backward_steps.current()).add(state, group)

    return note


def _join_backward_step(this: Pass) -> Step | None:
    """The step of a reentrant recomputation, which has a backward pass of its own inside the one that it is part of."""
    if this.replayed is None or not this.reentrant:
        return None
    step: Step = this.replayed.backward_step or backward_steps.current()
    for tape in this.recorded:
        tape.backward_step = step
    return step


class autocast:
    """Modules inside quantize by ``recipe``.

    ``enabled=False`` turns quantization off again; ``calibrating`` only records statistics. ``recipe`` is a
    recipe, a preset's name, a one-line recipe or a file. Delayed scaling takes the largest amax over
    ``amax_reduction_group`` (all ranks by default).

    The scales of delayed scaling are updated on leaving the outermost enabled level. A region without
    gradients, one left by an exception and a recomputation in backward update nothing and leave no trace.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: RecipeLike = None,
        amax_reduction_group: Any = None,
    ) -> None:
        self._enabled = enabled
        self._calibrating = calibrating
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._group = amax_reduction_group
        self._outer: PrecisionContext | None = None
        self._step: Step | None = None

    def __enter__(self) -> Self:
        if self._outer is not None:
            raise RuntimeError("this autocast is entered already; make another one to nest them")
        recipe = get_default_recipe() if self._recipe is None else self._recipe
        runs = self._enabled or self._calibrating
        if runs:
            check_recipe_support(recipe)
        if _active.get().step is not None:
            leave_abandoned_calls()
        self._outer, outer = _active.get(), active()
        find_pass(outer)  # checkpoints note what they were entered in
        if runs and outer.step is None:
            self._step = Step()
            expect_layers(self._step, recipe)
        activate(
            replace(
                outer,
                enabled=self._enabled,
                calibrating=self._calibrating,
                recipe=recipe,
                group=self._group,
                step=outer.step or self._step,
                depth=outer.depth + 1,
                task=torch._C._current_graph_task_id(),
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outer is not None
        step = active().step
        if kind is not None and step is not None:
            step.aborted = True
        opened, outer, recipe = self._step, self._outer, active_recipe()
        self._step = self._outer = None
        activate(outer)
        if opened is not None:
            _finish(opened, always=self._calibrating)
            if kind is None:
                warn_of_unused(opened, recipe, stacklevel=2)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules made inside keep their GEMM weights in quantized form only.

    ``preserve_high_precision_init_val`` keeps a CPU copy of what they were made from, for master weights:
    ``weight.get_high_precision_init_val()``, ``weight.clear_high_precision_init_val()``.
    """
    outer = _active.get()
    inner = replace(active(), quantized_parameters=enabled, preserve_init_value=preserve_high_precision_init_val)
    if enabled:
        chosen = get_default_recipe() if recipe is None else as_recipe(recipe)
        check_recipe_support(chosen)
        inner = replace(inner, recipe=chosen)
    activate(inner)
    try:
        yield
    finally:
        activate(outer)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: RecipeLike = None, fp8_group: Any = None
) -> autocast:
    """The old name of `autocast`."""
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """The old name of `quantized_model_init`."""
    # One level for the generator, one for contextlib: the warning is about the caller's line.
    warnings.warn("fp8_model_init is deprecated: use quantized_model_init", DeprecationWarning, stacklevel=3)
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
