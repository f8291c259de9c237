"""Whatever stands for a recipe, as a recipe."""

from __future__ import annotations

import importlib
import os

from .base import Recipe


def as_recipe(value: Recipe | str | os.PathLike[str]) -> Recipe:
    """A recipe as it is; a preset's name, a one-line recipe or a file's path as the recipe it stands for."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, (str, os.PathLike)):
        # The language stands on the recipes, so it is looked up when it is used.
        language = importlib.import_module(".gemm_recipe", __package__)
        recipe: Recipe = language.GemmRecipe.load(value)
        return recipe
    raise TypeError(
        f"a recipe is a Recipe, a preset's name, a one-line recipe or a path, not {type(value).__name__}: {value!r}"
    )
