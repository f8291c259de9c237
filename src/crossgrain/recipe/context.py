"""The contexts that make a recipe active: `autocast` around a forward pass, `quantized_model_init` around construction.

    with autocast(recipe=MXFP8BlockScaling()):
        loss = model(x).sum()
    loss.backward()

A context is active only in the thread, and in the asyncio task, that entered it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ..quantizers import observer
from ..quantizers.nonfinite import Policy
from ..runtime.passes import Pass, current_pass, find_pass, replayed_tape, within
from ..runtime.step_count import begin_step
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


class PrecisionContext(NamedTuple):
    """What the contexts around the running code say.

    Attributes:
        enabled: modules quantize.
        calibrating: modules only record statistics.
        recipe: the recipe; None for the default recipe.
        group: process group over which delayed scaling takes the largest amax.
        quantized_parameters: new modules keep their weights quantized.
        preserve_init_value: quantized weights keep a copy of their initial values.
        step: collects the delayed-scaling states that run in the outermost enabled autocast.
        nonfinite: the policy about NaNs and infinities of layers whose recipe does not say one; None for `settings`.
        depth: number of nested autocasts.
        task: id of the backward pass in which the autocast was entered; -1 outside of backward.

    Examples:
        >>> with cg.autocast(recipe="mxfp8"):
        ...     context = cg.recipe.active()
        ...     y = cg.Linear(32, 32)(torch.randn(32, 32))
        >>> context.enabled, context.depth
        (True, 1)
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    quantized_parameters: bool = False
    preserve_init_value: bool = False
    step: Step | None = None
    nonfinite: Policy | None = None
    depth: int = 0
    task: int = -1


_NOTHING = PrecisionContext()
_active: ContextVar[PrecisionContext] = ContextVar("crossgrain_precision", default=_NOTHING)


def active() -> PrecisionContext:
    """The active context. In a recomputation it is the context of the first pass, not that around ``backward()``.

    Examples:
        >>> cg.recipe.active().enabled
        False
    """
    context, task = _active.get(), torch._C._current_graph_task_id()
    if task in (-1, context.task):
        return context
    tape = replayed_tape()
    return context if tape is None else tape.outside


def this_pass() -> Pass:
    """The pass of the activation checkpoints, if any, that the running code is part of.

    Examples:
        >>> cg.recipe.this_pass().recomputes
        False
    """
    return find_pass(active())


def activate(context: PrecisionContext) -> None:
    """Make a context the active one. The caller restores the context before it."""
    _active.set(context)


def active_recipe() -> Recipe:
    """The active recipe, or the default recipe if there is none.

    Examples:
        >>> type(cg.recipe.active_recipe())  # outside of all contexts
        <class 'crossgrain.recipe.blockwise.MXFP8BlockScaling'>
    """
    recipe = active().recipe
    return get_default_recipe() if recipe is None else recipe


def forward_step(state: RecipeState) -> AbstractContextManager[None]:
    """A context manager for all that the forward of a module quantizes.

    Delayed scaling is updated when the outermost autocast ends, or, without an autocast, when this context ends. A
    recomputation in backward uses the scales of the first pass and updates nothing.

    Raises:
        RuntimeError: delayed scaling runs in backward, but not in a checkpoint that recorded its first pass.

    Examples:
        >>> state = cg.recipe.RecipeState.create(cg.recipe.DelayedScaling(), mode="forward", num_quantizers=2)

        >>> quantize_input, quantize_weight = state.make_quantizers()
        >>> with cg.recipe.forward_step(state):
        ...     x = quantize_input(torch.tensor([7.0]))
        >>> state.scale[0]  # the largest power of two by which 7 is not above 448
        tensor(64.)
    """
    this = this_pass()
    step = within(this) if state.delayed is None else _delayed_step(state, state.delayed, this)
    return observer.noting_gradients(step, this) if observer.observers else step


@contextmanager
def _delayed_step(state: RecipeState, delayed: DelayedScalingRecipeState, this: Pass) -> Iterator[None]:
    if not this.recomputes and in_backward() and torch.is_grad_enabled():
        raise RuntimeError(
            "delayed scaling runs in backward, outside of all checkpoints that crossgrain knows: a recomputation needs "
            "the scales of its first pass. Recompute with crossgrain.checkpoint or torch.utils.checkpoint.checkpoint, "
            "and not inside a compiled function"
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
    """A context manager inside `forward_step`, for a part of the forward that has its own activation checkpoint.

    Examples:
        >>> state = cg.recipe.RecipeState.create(cg.recipe.DelayedScaling(), mode="forward", num_quantizers=1)

        >>> (quantize_input,) = state.make_quantizers()
        >>> with cg.recipe.forward_step(state), cg.recipe.forward_part(state):
        ...     x = quantize_input(torch.tensor([7.0]))
    """
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
    """A context manager: all forward passes inside are one step of delayed scaling, or part of the step around them.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.recipe.one_step():  # both calls are one entry of the amax histories
        ...     for _ in range(2):
        ...         with cg.autocast(recipe=cg.recipe.DelayedScaling()):
        ...             y = layer(torch.randn(32, 32))
    """
    context = active()
    if context.step is not None or this_pass().recomputes:
        yield
        return
    outer, step = _active.get(), Step()
    begin_step()
    activate(context._replace(step=step))
    try:
        yield
    except BaseException:
        step.aborted = True
        raise
    finally:
        activate(outer)
        _finish(step)


def _finish(step: Step, *, always: bool = False) -> None:
    """End a forward step; or undo it if there was an error, if no backward pass will follow, or in backward."""
    step.close()
    if (always or this_pass().trains) and not in_backward() and not step.aborted:
        step.end()
    else:
        step.undo()


def backward_note(state: RecipeState) -> Callable[[], None]:
    """Return a function that backward calls before it quantizes: ``state`` is updated when backward is complete.

    Examples:
        >>> state = cg.recipe.RecipeState.create(cg.recipe.DelayedScaling(), mode="backward", num_quantizers=1)

        >>> note = cg.recipe.backward_note(state)  # in forward
        >>> y = torch.ones(1, requires_grad=True) * 2
        >>> _ = y.register_hook(lambda gradient: note())  # in backward
        >>> y.backward()
    """
    group, step = active().group, _join_backward_step(this_pass())

    def note() -> None:
        (step or backward_steps.current()).add(state, group)

    return note


def _join_backward_step(this: Pass) -> Step | None:
    """The step of the outer backward pass, if this is a reentrant recomputation: it runs a backward pass inside it."""
    if this.replayed is None or not this.reentrant:
        return None
    step: Step = this.replayed.backward_step or backward_steps.current()
    for tape in this.recorded:
        tape.backward_step = step
    return step


class autocast:
    """Context manager in which modules quantize as a recipe says. Call ``backward()`` outside of it.

    The scales of delayed scaling are updated at the end of the outermost enabled autocast. Nothing is updated, and
    nothing is recorded, if gradients are disabled, if an exception ends the autocast, or in a recomputation.

    Args:
        enabled: False turns quantization off inside an outer autocast.
        calibrating: with ``enabled=False``, compute in high precision and only record the amaxes of tensors.
        recipe: a recipe, the name of a preset, a recipe in one line of text, or the path of a recipe file. None for
            `get_default_recipe`.
        amax_reduction_group: process group over which delayed scaling takes the largest amax. None for all ranks.

    Raises:
        RuntimeError: the recipe cannot run here in strict mode, or this object is entered a second time while it is
            active.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe="fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"):
        ...     y = layer(torch.randn(32, 32))
        >>> y.sum().backward()  # outside: the pass keeps its recipe
    """

    _nonfinite: Policy | None = None  # the policy about NaNs and infinities of layers whose recipe does not say one

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
            raise RuntimeError("this autocast is already entered; create another autocast object to nest them")
        recipe = get_default_recipe() if self._recipe is None else self._recipe
        runs = self._enabled or self._calibrating
        if runs:
            check_recipe_support(recipe)
        if _active.get().step is not None:
            leave_abandoned_calls()
        self._outer, outer = _active.get(), active()
        find_pass(outer)  # checkpoints record the context that they were entered in
        if runs and outer.step is None:
            self._step = Step()
            begin_step()
            expect_layers(self._step, recipe)
        activate(
            outer._replace(
                enabled=self._enabled,
                calibrating=self._calibrating,
                recipe=recipe,
                group=self._group,
                step=outer.step or self._step,
                nonfinite=self._nonfinite,
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
                warn_of_unused(opened, recipe)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Context manager: modules that are created inside keep their GEMM weights only in quantized form.

    Args:
        enabled: False turns this off inside an outer context.
        recipe: the recipe whose formats the weights have: what `autocast` accepts. Train with the same recipe.
        preserve_high_precision_init_val: keep a copy of the initial values in high precision on the CPU, for an
            optimizer with master weights. ``weight.get_high_precision_init_val()`` returns it, and
            ``weight.clear_high_precision_init_val()`` frees it.

    Raises:
        RuntimeError: the recipe cannot run here in strict mode.

    Examples:
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     layer = cg.Linear(32, 32)
        >>> type(layer.weight)
        <class 'crossgrain.quantizers.mxfp8.MXFP8Tensor'>
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 32))
    """
    outer = _active.get()
    inner = active()._replace(quantized_parameters=enabled, preserve_init_value=preserve_high_precision_init_val)
    if enabled:
        chosen = get_default_recipe() if recipe is None else as_recipe(recipe)
        check_recipe_support(chosen)
        inner = inner._replace(recipe=chosen)
    activate(inner)
    try:
        yield
    finally:
        activate(outer)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: RecipeLike = None, fp8_group: Any = None
) -> autocast:
    """The old name of `autocast`; it is deprecated."""
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """The old name of `quantized_model_init`; it is deprecated."""
    # stacklevel 3: one level for the generator and one for contextlib, so that the warning names the caller's line.
    warnings.warn("fp8_model_init is deprecated: use quantized_model_init", DeprecationWarning, stacklevel=3)
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
