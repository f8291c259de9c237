"""``crossgrain explain``: show which format a recipe gives each direction of each tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..lab.gpt import GPT
from .output import AsJson, print_json
from .recipes import RecipeText, load_recipe, mistakes_are_shown
from .sizes import SizeName, preset_of


def explain(
    recipe: RecipeText,
    model: Annotated[SizeName | None, typer.Option(help="Show the layers of the small GPT of this size.")] = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Show every layer; otherwise equal layers share a row.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which format each GEMM reads, layer by layer, and which part of the recipe decides it."""
    loaded = load_recipe(recipe)
    gpt = None
    if model is not None:
        with torch.device("meta"):
            gpt = GPT(preset_of(model).model)
    with mistakes_are_shown():
        explanation = loaded.explain(gpt, every_layer=every_layer)
    if as_json:
        print_json({"recipe": explanation.title, "rows": [asdict(row) for row in explanation.rows]})
    else:
        Console(highlight=False).print(explanation)
