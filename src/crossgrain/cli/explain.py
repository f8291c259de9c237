"""``crossgrain explain``: show which format a recipe gives each direction of each tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from ..convert import ConvertReport, convert
from ..gpt.model import GPT
from ..recipe import Explanation, RecipeSchedule, ScheduleExplanation
from ..runtime.logs import withheld
from .hf_models import model_without_weights
from .mistakes import mistakes_are_shown
from .output import AsJson, print_json
from .recipes import RecipeText, load_schedule
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
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of all steps, to show at which step each phase of a schedule begins."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    loaded = load_schedule(recipe)
    if model is not None and hf is not None:
        raise typer.BadParameter("--model and --hf exclude each other")
    built: nn.Module | None = None
    if model is not None:
        with torch.device("meta"):
            built = GPT(preset_of(model).model)
    elif hf is not None:
        built = model_without_weights(hf)
    shown: Explanation | ScheduleExplanation
    with mistakes_are_shown(), withheld() as warned:
        if isinstance(loaded, RecipeSchedule):
            shown = loaded.explain(built, steps, every_layer=every_layer)
        else:
            shown = loaded.explain(built, every_layer=every_layer)
        reports = _reports(built, shown) if hf is not None and built is not None else []
    if as_json:
        print_json(_as_json(shown, reports))
        return
    console = Console(highlight=False)
    console.print(shown)
    for report in reports:
        _show(report, console)
    for text in dict.fromkeys(warned):
        console.print(text, style="yellow", markup=False)


def _reports(model: nn.Module, shown: Explanation | ScheduleExplanation) -> list[ConvertReport]:
    """What converting the model does; of a schedule, in each phase."""
    recipes = [shown.title] if isinstance(shown, Explanation) else [phase.explanation.title for phase in shown.phases]
    return [convert(model, recipe) for recipe in recipes]


def _show(report: ConvertReport, console: Console) -> None:
    recipe, summary, *lines = str(report).splitlines()
    console.print(summary, style="bold", markup=False)
    for line in (recipe, *lines):
        console.print(f"- {line}", markup=False)


def _as_json(shown: Explanation | ScheduleExplanation, reports: list[ConvertReport]) -> dict[str, Any]:
    if isinstance(shown, Explanation):
        of_recipe = {"recipe": shown.title, "rows": [asdict(row) for row in shown.rows]}
        return {**of_recipe, **_shares(reports[0])} if reports else of_recipe
    phases = [
        {
            "start": phase.start,
            "phase": phase.label,
            "recipe": phase.explanation.title,
            "rows": [asdict(row) for row in phase.explanation.rows],
        }
        for phase in shown.phases
    ]
    for phase, report in zip(phases, reports, strict=False):
        phase.update(_shares(report))
    return {"schedule": shown.title, "phases": phases}


def _shares(report: ConvertReport) -> dict[str, Any]:
    return {
        "quantized_share": report.quantized_share,
        "left": [{"path": path, "why": why, "share": report.share(path)} for path, why in report.left.items()],
    }
