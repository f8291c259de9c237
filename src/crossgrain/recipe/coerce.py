"""Whatever stands for a recipe, as a recipe."""

from __future__ import annotations

import os

from .base import Recipe
from .gemm_recipe import GemmRecipe


def as_recipe(value: Recipe | str | os.PathLike[str]) -> Recipe:
    """A recipe as it is; a preset's name, a one-line recipe or a file's path as the recipe it stands for."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, (str, os.PathLike)):
        return GemmRecipe.load(value)
    raise TypeError(
        f"a recipe is a Recipe, a preset's name, a one-line recipe or a path, not {type(value).__name__}: {value!r}"
    )
