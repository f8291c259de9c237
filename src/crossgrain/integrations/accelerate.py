"""`prepare`, in place of `Accelerator.prepare`: converts models before they are wrapped.

accelerator = Accelerator()
model, optimizer, data = prepare(accelerator, "mxfp8", model, optimizer, data, skip="lm_head")
...
accelerator.save_state(directory)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..convert import convert
from ..recipe import Recipe, as_recipe
from .conversion import Choices, Conversion
from .needs import not_installed
from .wrappers import is_converted, unwrapped, why_too_late

try:
    from accelerate import Accelerator
except ImportError as error:
    raise not_installed("accelerate", "accelerate", error) from error


def prepare(
    accelerator: Accelerator,
    recipe: Recipe | str,
    *objects: Any,
    skip: Choices = (),
    include: Choices = (),
    norms: bool = False,
    allow_other_recipe: bool = False,
) -> Any:
    """Convert the models among ``objects``, then call ``accelerator.prepare(*objects)``.

    A layer keeps its parameters when it is converted, so the optimizer may have been made before. The recipe is saved
    by ``accelerator.save_state``, and ``accelerator.load_state`` checks that it is the same; histories of delayed
    scaling are saved and loaded with the weights.

    Args:
        accelerator: the accelerator.
        recipe: a recipe, the name of a preset, a one-line recipe or a file, as for `crossgrain.convert`.
        *objects: what to prepare: models, optimizers, data loaders, schedulers.
        skip: layers not to convert, as for `crossgrain.convert`.
        include: layers to convert that are not by default, as for `crossgrain.convert`.
        norms: convert norms too.
        allow_other_recipe: let ``accelerator.load_state`` load also what was saved with another recipe.

    Returns:
        What ``accelerator.prepare`` returns.

    Raises:
        ValueError: there is no model among the objects, or one cannot be converted.
        RuntimeError: a model has been prepared before, so that it is too late to convert it.
    """
    recipe = as_recipe(recipe)
    models = [each for each in objects if isinstance(each, nn.Module)]
    if not models:
        raise ValueError("there is no model to convert among the objects; call accelerator.prepare for these")
    for model in models:
        prepared = any(unwrapped(own) is unwrapped(model) for own in accelerator._models)
        problem = "it has been prepared before" if prepared else why_too_late(model)
        if problem and not is_converted(unwrapped(model)):
            raise RuntimeError(
                f"this {type(unwrapped(model)).__name__} can no longer be converted: {problem}. Call "
                "crossgrain.integrations.accelerate.prepare in place of accelerator.prepare, with the plain model"
            )
    conversion = Conversion.of(recipe, skip, include, norms)
    for model in models:
        report = convert(unwrapped(model), recipe, skip=skip, include=include, norms=norms)
        if accelerator.is_main_process:
            print(report)
    accelerator.register_for_checkpointing(_SavedConversion(conversion, allow_other_recipe))
    return accelerator.prepare(*objects)


class _SavedConversion:
    """What `Accelerator.save_state` keeps, and `load_state` compares."""

    def __init__(self, conversion: Conversion, allow_other_recipe: bool) -> None:
        self._conversion = conversion
        self._allow_other_recipe = allow_other_recipe

    def state_dict(self) -> dict[str, Any]:
        return self._conversion.plain()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._conversion.check_same(Conversion.from_plain(state), self._allow_other_recipe)
