"""``crossgrain explain``: show which format a recipe gives each direction of each tensor."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from ..convert import ConvertReport, convert
from ..lab.gpt import GPT
from .hf_models import model_without_weights
from .output import AsJson, print_json
from .recipes import RecipeText, load_recipe, mistakes_are_shown
from .sizes import SizeName, preset_of


def explain(
    recipe: RecipeText,
    model: Annotated[SizeName | None, typer.Option(help="Show the layers of the small GPT of this size.")] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Show the layers of a model of transformers, and which share of its multiply-adds is quantized: a "
            "config.json, its directory, or a name on the hub. Weights are not loaded.",
        ),
    ] = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Show every layer; otherwise equal layers share a row.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which format each GEMM reads, layer by layer, and which part of the recipe decides it."""
    loaded = load_recipe(recipe)
    if model is not None and hf is not None:
        raise typer.BadParameter("--model and --hf exclude each other")
    built: nn.Module | None = None
    report = None
    if model is not None:
        with torch.device("meta"):
            built = GPT(preset_of(model).model)
    elif hf is not None:
        built = model_without_weights(hf)
    with mistakes_are_shown(), warnings.catch_warnings(record=True) as caught:
        explanation = loaded.explain(built, every_layer=every_layer)
        if hf is not None and built is not None:
            report = convert(built, loaded)
    if as_json:
        shown: dict[str, Any] = {"recipe": explanation.title, "rows": [asdict(row) for row in explanation.rows]}
        print_json(shown if report is None else {**shown, **_as_json(report)})
        return
    console = Console(highlight=False)
    console.print(explanation)
    if report is not None:
        _show(report, console)
    for warning in caught:
        console.print(str(warning.message), style="yellow", markup=False)


def _show(report: ConvertReport, console: Console) -> None:
    _, summary, *lines = str(report).splitlines()
    console.print(summary, style="bold", markup=False)
    for line in lines:
        console.print(f"- {line}", markup=False)


def _as_json(report: ConvertReport) -> dict[str, Any]:
    return {
        "quantized_share": report.quantized_share,
        "left": [{"path": path, "why": why, "share": report.share(path)} for path, why in report.left.items()],
    }
