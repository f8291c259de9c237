"""The recipe that travels with a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from ..nn import QuantizedModule
from ..recipe import Recipe
from ..recipe.coerce import as_recipe
from ..recipe.portable import recipe_to_text

RecipeChoice = Recipe | str | Literal["bound"] | None


def recipe_text(choice: RecipeChoice, objects: Iterable[Any]) -> str | None:
    """The text of a recipe. "bound": of the one that `convert` bound the models among ``objects`` to, if any."""
    if choice is None:
        return None
    if choice != "bound":
        return recipe_to_text(as_recipe(choice))
    found: list[Recipe] = []
    for model in objects:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            recipe = module.bound_recipe if isinstance(module, QuantizedModule) else None
            if recipe is not None and not any(recipe is known or recipe == known for known in found):
                found.append(recipe)
    if len(found) > 1:
        raise ValueError(
            f"the layers are bound to {len(found)} recipes: say with recipe= which of them travels with the file, None "
            f"if none does: {'; '.join(map(str, found))}"
        )
    return recipe_to_text(found[0]) if found else None
