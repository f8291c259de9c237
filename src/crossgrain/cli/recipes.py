"""Recipes as they are given on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from ..recipe import GemmRecipe, RecipeSyntaxError

RecipeText = Annotated[
    str, typer.Option("--recipe", "-r", help="A preset, a one-line recipe, or a .yaml or .json file.")
]

_LONGEST_LABEL = 22  # what a table of 80 columns has room for


@contextmanager
def mistakes_are_shown() -> Iterator[None]:
    """A recipe that is wrong, or that does not fit the model, ends the program with the exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        console = Console(stderr=True, highlight=False)
        text = error.shown(console.width - 8) if isinstance(error, RecipeSyntaxError) else str(error)
        console.print(text, style="red", markup=False, soft_wrap=isinstance(error, RecipeSyntaxError))
        raise typer.Exit(2) from error


def load_recipe(text: str) -> GemmRecipe:
    with mistakes_are_shown():
        return GemmRecipe.load(text)


def split_recipes(texts: Sequence[str]) -> list[str]:
    """The recipes in ``mxfp8,nvfp4, dgrad: mxfp8``: a comma separates, unless a setting or an option follows it."""
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
    """Recipes by a short name: what was given, or a letter if that is long."""
    recipes: dict[str, GemmRecipe] = {}
    for text in texts:
        recipe = load_recipe(text)
        label = text if len(text) <= _LONGEST_LABEL else f"recipe {chr(ord('A') + len(recipes) % 26)}"
        recipes.setdefault(label, recipe)
    return recipes
