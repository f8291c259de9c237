"""Find the recipe that is stored in a file together with a model."""

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
    """Return the recipe to store, as text, or None if no recipe is stored.

    Args:
        choice: a recipe or its text; None to store no recipe; "bound" for the recipe that `crossgrain.convert` attached
            to the layers of the models.
        objects: what is saved; the modules among them are searched for a bound recipe.

    Raises:
        ValueError: ``choice`` is "bound" and the layers are bound to different recipes.
    """
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
            f"the layers are bound to {len(found)} different recipes, and a file stores only one. Pass recipe= with "
            f"the recipe to store, or recipe=None to store none. The recipes are: {'; '.join(map(str, found))}"
        )
    return recipe_to_text(found[0]) if found else None
