"""`as_recipe`: turn what a caller passes as a recipe into a `Recipe`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .base import Recipe
from .gemm_recipe import GemmRecipe
from .phases import refuse_schedule
from .schedule import RecipeSchedule


def as_recipe(value: Recipe | RecipeSchedule | str | os.PathLike[str] | Mapping[str, Any]) -> Recipe:
    """Return the recipe that a value stands for.

    Args:
        value: a recipe, which is returned as it is; the name of a preset; a recipe in one line of text; or the path of
            a .yaml, .yml or .json file, or a mapping as in such a file.

    Raises:
        TypeError: the value is none of these.
        ValueError: the text or the file is not a recipe, or it is a schedule, which changes during training.

    Examples:
        >>> cg.recipe.as_recipe("mxfp8") == cg.GemmRecipe.load("mxfp8")
        True
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, RecipeSchedule):
        refuse_schedule(f"'{value}'")
    if isinstance(value, (str, os.PathLike, Mapping)):
        return GemmRecipe.load(value)
    raise TypeError(
        "a recipe must be a Recipe, the name of a preset, a recipe in one line of text, the path of a file or a "
        f"mapping, got {type(value).__name__}: {value!r}"
    )
