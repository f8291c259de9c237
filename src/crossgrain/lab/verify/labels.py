"""Recipes as users pass them: loaded, and under labels that a table has room for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...recipe import GemmRecipe, Recipe, RecipeSchedule
from .result import HIGH_PRECISION

AnyRecipe = Recipe | RecipeSchedule | str | os.PathLike[str] | Mapping[str, Any] | None
Loaded = Recipe | RecipeSchedule | None

_LONGEST = 32


def loaded(value: AnyRecipe) -> Loaded:
    """The recipe that a value stands for; a schedule if it has phases; None for high precision.

    Raises:
        TypeError: the value is not a recipe.
        ValueError: the text or the file is not a recipe.
    """
    if value is None or isinstance(value, (Recipe, RecipeSchedule)):
        return value
    schedule = RecipeSchedule.load(value)
    return schedule if schedule.changes else GemmRecipe.load(value)


def text_of(recipe: Loaded) -> str | None:
    """The recipe in one line of text, by which two of them are compared; None for high precision."""
    return None if recipe is None else str(recipe)


def labelled(
    recipes: Iterable[AnyRecipe] | Mapping[str, AnyRecipe], known: Mapping[str, str | None]
) -> dict[str, Loaded]:
    """Load recipes, and give each a label.

    Args:
        recipes: the recipes, or recipes by label. A recipe without a label is called what it was written as, or
            "recipe A" and so on, if that is long.
        known: texts of recipes that have a label already, which they keep.

    Raises:
        ValueError: a recipe is not one, is there twice, or has the label of another one.
    """
    given = recipes.items() if isinstance(recipes, Mapping) else [(None, value) for value in recipes]
    texts, found = dict(known), dict[str, Loaded]()
    for own, value in given:
        recipe = loaded(value)
        text = text_of(recipe)
        label = own or next((name for name, other in texts.items() if other == text), None)
        label = label or _new_label(value, texts)
        if label in found or any(text_of(other) == text for other in found.values()):
            raise ValueError(f"the recipe {label!r} is there twice; control=True compares a recipe with itself")
        if label in texts and texts[label] != text:
            raise ValueError(f"{label!r} is the label of two recipes: '{texts[label]}' and '{text}'")
        texts[label], found[label] = text, recipe
    return found


def _new_label(value: AnyRecipe, taken: Mapping[str, str | None]) -> str:
    if value is None:
        return HIGH_PRECISION
    written = str(value) if isinstance(value, (str, os.PathLike, Recipe, RecipeSchedule)) else ""
    if 0 < len(written) <= _LONGEST and written not in taken:
        return written
    return next(name for i in range(len(taken) + 1) if (name := f"recipe {_letters(i)}") not in taken)


def _letters(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    head, tail = divmod(index, 26)
    return ("" if head == 0 else _letters(head - 1)) + chr(ord("A") + tail)
