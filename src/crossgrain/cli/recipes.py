"""Read recipes from the arguments of a command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import typer

from ..recipe import GemmRecipe, RecipeSchedule
from .mistakes import mistakes_are_shown

RecipeText = Annotated[
    str, typer.Option("--recipe", "-r", help="A preset, a one-line recipe or schedule, or a .yaml or .json file.")
]

_Loaded = TypeVar("_Loaded", bound=GemmRecipe | RecipeSchedule)
_LONGEST_LABEL = 22  # what a table of 80 columns has room for


def load_recipe(text: str) -> GemmRecipe:
    """Read a preset, a one-line recipe or a file; end the program if it is wrong."""
    with mistakes_are_shown():
        return GemmRecipe.load(text)


def load_schedule(text: str) -> GemmRecipe | RecipeSchedule:
    """As `load_recipe`, but phases are allowed: with phases, it is a schedule."""
    with mistakes_are_shown():
        schedule = RecipeSchedule.load(text)
        return schedule if schedule.changes else GemmRecipe.load(text)


def split_recipes(texts: Sequence[str]) -> list[str]:
    """Split texts such as ``mxfp8,nvfp4, dgrad: mxfp8`` into recipes, here ``mxfp8`` and ``nvfp4, dgrad: mxfp8``.

    A comma separates recipes, unless a setting or an option of the same recipe follows it.
    """
    found: list[str] = []
    for text in texts:
        pieces = re.split(r",(?![^()]*\))", text)  # not inside parentheses
        for i, piece in enumerate(pieces):
            is_setting = ":" in piece.partition(";")[0]
            if i and is_setting:
                found[-1] += f",{piece}"
            else:
                found.append(piece)
    return [piece.strip() for piece in found]


def labelled(texts: Sequence[str]) -> dict[str, GemmRecipe]:
    """Recipes by a label: the text itself, or ``recipe A`` and so on if the text is long."""
    return _labelled(texts, load_recipe)


def labelled_schedules(texts: Sequence[str]) -> dict[str, GemmRecipe | RecipeSchedule]:
    """As `labelled`, but phases are allowed."""
    return _labelled(texts, load_schedule)


def _labelled(texts: Sequence[str], load: Callable[[str], _Loaded]) -> dict[str, _Loaded]:
    recipes: dict[str, _Loaded] = {}
    for text in texts:
        recipe = load(text)
        number = len(recipes)
        name = chr(ord("A") + number) if number < 26 else str(number + 1)
        recipes.setdefault(text if len(text) <= _LONGEST_LABEL else f"recipe {name}", recipe)
    return recipes
