"""What an autocast was asked for and did not do: no layer ran inside, or a rule of its recipe is for none that ran."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from .base import Recipe
from .gemm_recipe import GemmRecipe
from .rules import Glob
from .updates import Step

_checked: weakref.WeakSet[GemmRecipe] = weakref.WeakSet()  # whose rules were compared with layers that ran


def expect_layers(step: Step, recipe: Recipe) -> None:
    """Have modules that run in ``step`` note their roles, if rules of ``recipe`` were not yet compared with any."""
    if isinstance(recipe, GemmRecipe) and recipe.rules and recipe not in _checked:
        step.roles = set()


def warn_of_unused(step: Step, recipe: Recipe, stacklevel: int) -> None:
    """Warn if the autocast that opened ``step`` has had no effect, or a rule of it."""
    if not step.layers_ran:
        warnings.warn(
            "no layer of crossgrain ran inside this autocast, so nothing was quantized. Convert the model with "
            "crossgrain.convert(model, recipe), or build it of crossgrain.Linear and other layers of crossgrain.",
            stacklevel=stacklevel + 1,
        )
    if step.roles and isinstance(recipe, GemmRecipe):
        _checked.add(recipe)
        unmatched = _unmatched(recipe, step.roles)
        if unmatched:
            ran = sorted({role.name or "(no name)" for role in step.roles})
            shown = ", ".join(ran[:5]) + (f" and {len(ran) - 5} more" if len(ran) > 5 else "")
            warnings.warn(
                f"no layer that ran inside this autocast is matched by {', '.join(unmatched)}, so the rule has had no "
                f"effect. The layers that ran: {shown}. Patterns are for whole names; crossgrain.name_layers(model) "
                "names layers by their paths.",
                stacklevel=stacklevel + 1,
            )


def _unmatched(recipe: GemmRecipe, roles: set[Any]) -> list[str]:
    found = []
    for index, rule in enumerate(recipe.rules):
        matcher = rule.matcher
        singles = [Glob((pattern,)) for pattern in matcher.patterns] if isinstance(matcher, Glob) else [matcher]
        if any(not any(single.matches(role.name, role.module_type) for role in roles) for single in singles):
            found.append(recipe.rule_label(index))
    return found
