"""What an autocast was asked for and did not do: no layer ran inside, or a rule of its recipe is for none that ran."""

from __future__ import annotations

import weakref

from ..runtime.callers import line_of_caller
from ..runtime.logs import warn
from .base import Recipe
from .gemm_recipe import GemmRecipe
from .roles import QuantizerRole
from .updates import Step

_ran_with: weakref.WeakKeyDictionary[GemmRecipe, set[QuantizerRole]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakKeyDictionary[GemmRecipe, set[str]] = weakref.WeakKeyDictionary()


def expect_layers(step: Step, recipe: Recipe) -> None:
    """Have modules that run for the first time in ``step`` note their roles, if rules of ``recipe`` may match none."""
    if isinstance(recipe, GemmRecipe) and recipe.rules and not recipe.checked_with_model:
        step.roles = set()


def warn_of_unused(step: Step, recipe: Recipe) -> None:
    """Warn if the autocast that opened ``step`` has had no effect, or a rule of it."""
    if not step.layers_ran:
        warn(
            __name__,
            f"no layer of crossgrain ran inside this autocast ({line_of_caller()}), so nothing was quantized. Convert "
            "the model with crossgrain.convert(model, recipe), or build it of crossgrain.Linear and other layers of "
            "crossgrain. Only forward needs an autocast: around backward() it has no effect.",
        )
    if step.roles and isinstance(recipe, GemmRecipe):
        roles, warned = _ran_with.setdefault(recipe, set()), _warned.setdefault(recipe, set())
        roles |= step.roles
        unmatched = [label for label in _unmatched(recipe, roles) if label not in warned]
        warned.update(unmatched)
        if unmatched:
            ran = sorted({role.layer or "(no name)" for role in roles})
            shown = ", ".join(ran[:5]) + (f" and {len(ran) - 5} more" if len(ran) > 5 else "")
            warn(
                __name__,
                f"no layer that ran inside this autocast is matched by {', '.join(unmatched)}, so the rule has had no "
                f"effect. The layers that ran: {shown}. Patterns are for whole names; crossgrain.name_layers(model) "
                "names layers by their paths. If only a part of the model ran, use recipe.for_model(model), which "
                "compares rules with the whole model.",
            )


def _unmatched(recipe: GemmRecipe, roles: set[QuantizerRole]) -> list[str]:
    index = recipe.rule_index
    layers = {(role.layer, role.module_type) for role in roles}
    matched = {place for name, module_type in layers for place in index.places(name, module_type)}
    rules = dict.fromkeys(place.rule for place, _ in index.singles() if place not in matched)
    return [recipe.rule_label(rule) for rule in rules]
