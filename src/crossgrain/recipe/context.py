"""The contexts that say which recipe is in force: around a forward pass, and around a model's construction.

    with autocast(recipe=MXFP8BlockScaling()):
        loss = model(x).sum()
    loss.backward()

Contexts are per thread and per task: what one thread enters, others do not see.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch

from .base import Recipe
from .coerce import as_recipe
from .state import RecipeState
from .support import check_recipe_support, get_default_recipe
from .updates import Step, backward_steps, in_backward

RecipeLike = Recipe | str | os.PathLike[str] | None


@dataclass(frozen=True)
class PrecisionContext:
    """What is in force. ``step`` collects the states of the outermost enabled autocast, ``depth`` counts all."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    quantized_parameters: bool = False
    preserve_init_value: bool = False
    step: Step | None = None
    depth: int = 0


_NOTHING = PrecisionContext()
_active: ContextVar[PrecisionContext] = ContextVar("crossgrain_precision", default=_NOTHING)


def active() -> PrecisionContext:
    """The context in force."""
    return _active.get()


def activate(context: PrecisionContext) -> None:
    """Put a context in force as it is; whoever does so restores the one before."""
    _active.set(context)


def active_recipe() -> Recipe:
    """The recipe in force; the default one if none is."""
    recipe = active().recipe
    return get_default_recipe() if recipe is None else recipe


def ran_in_forward(state: RecipeState) -> None:
    """Modules say so before they quantize: delayed scaling is updated when the outermost autocast ends."""
    context = active()
    if context.step is not None:
        context.step.add(state, context.group)


@contextmanager
def forward_step(state: RecipeState) -> Iterator[None]:
    """The same around a module's forward, for modules that also run where no autocast is in force.

    Inside an autocast this is `ran_in_forward`; elsewhere the module's own forward is the step.
    """
    if active().step is not None or state.delayed is None:
        ran_in_forward(state)
        yield
        return
    step = Step()
    step.add(state)
    try:
        yield
    except BaseException:
        step.aborted = True
        raise
    finally:
        _finish(step)


def _finish(step: Step, *, always: bool = False) -> None:
    """End a forward step, or forget it: without gradients, after an error, or in a recomputation."""
    step.close()
    if (always or torch.is_grad_enabled()) and not in_backward() and not step.aborted:
        step.end()
        return
    recomputes = in_backward() and torch.is_grad_enabled() and not step.aborted
    for state in step.undo():
        if recomputes and not state.amax_history.any() and bool((state.scale == 1).all()):
            raise RuntimeError(
                "delayed scaling is recomputed in backward without ever having seen a forward step: reentrant "
                "checkpointing runs forward without gradients, like a validation, and would never learn a scale. Use "
                "checkpoint(..., use_reentrant=False), or an autocast around the whole forward pass"
            )


def ran_in_backward(state: RecipeState, group: Any = None) -> None:
    """The same for a backward pass, which updates at its end; ``group`` is the forward pass's ``active().group``."""
    backward_steps.current().add(state, group)


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
        outer = self._outer = active()
        if runs and outer.step is None:
            self._step = Step()
        activate(
            replace(
                outer,
                enabled=self._enabled,
                calibrating=self._calibrating,
                recipe=recipe,
                group=self._group,
                step=outer.step or self._step,
                depth=outer.depth + 1,
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
        opened, outer = self._step, self._outer
        self._step = self._outer = None
        activate(outer)
        if opened is not None:
            _finish(opened, always=self._calibrating)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules made inside keep their GEMM weights in quantized form only.

    ``preserve_high_precision_init_val`` keeps a CPU copy of what they were made from, for master weights:
    ``weight.get_high_precision_init_val()``, ``weight.clear_high_precision_init_val()``.
    """
    outer = active()
    inner = replace(outer, quantized_parameters=enabled, preserve_init_value=preserve_high_precision_init_val)
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
