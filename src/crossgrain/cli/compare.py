"""``crossgrain compare``: compare recipes with fp32, as a table, a JSON file and a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..gpt.model import GPT
from ..gpt.training import Run
from ..lab.compare import BASELINE, Comparison, Row
from ..lab.compare import compare as run_comparison
from ..lab.intervals import with_spread
from ..lab.verify.text import verdict_text
from ..recipe import RecipeSchedule
from .mistakes import mistakes_are_shown
from .output import AsJson, print_json, progress_bar
from .recipes import labelled_schedules, split_recipes
from .sizes import Size, SizeName, Steps, preset_of

Recipes = Annotated[
    list[str],
    typer.Option("--recipes", "-r", help="Presets or one-line recipes, separated by commas. May be repeated."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds. Intervals over two are very wide.")]
Tolerance = Annotated[
    float | None, typer.Option(min=1e-12, help="Largest gap to accept, in nats per byte: verdicts are about it.")
]
Out = Annotated[Path, typer.Option(help="Directory to write compare.json and compare.png to.")]


def compare(
    recipes: Recipes = ["mxfp8,mxfp8-fwd-nvfp4-bwd,nvfp4"],  # noqa: B006  # typer copies it
    size: Size = SizeName.tiny,  # type: ignore[attr-defined]
    steps: Steps = None,
    seeds: Seeds = 3,
    tolerance: Tolerance = None,
    out: Out = Path("out"),
    as_json: AsJson = False,
) -> None:
    preset, chosen = preset_of(size, steps), labelled_schedules(split_recipes(recipes))
    with mistakes_are_shown():  # before anything is trained
        for recipe in chosen.values():
            for phase in RecipeSchedule.load(recipe).phases(preset.steps):
                phase.recipe.for_model(GPT(preset.model))
    out.mkdir(parents=True, exist_ok=True)

    with progress_bar() as progress:
        task = progress.add_task("", total=preset.steps * seeds * (len(chosen) + 1))

        def on_step(label: str, seed: int, run: Run) -> None:
            text = f"{label}, seed {seed}: step {len(run.losses)}, loss {run.losses[-1]:.3f}"
            progress.update(task, advance=1, description=text)

        result = run_comparison(preset, chosen, range(seeds), on_step, tolerance)

    saved = out / "compare.json"
    saved.write_text(json.dumps(result.to_dict(), indent=1))
    picture = _drawn(result, out / "compare.png")
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result, saved, picture)
    if result.interrupted:
        raise typer.Exit(130)


def _drawn(result: Comparison, path: Path) -> Path | None:
    if not result.rows():
        return None
    try:
        from ..lab.picture import draw
    except ModuleNotFoundError:
        return None
    draw(result, path)
    return path


def _show(result: Comparison, saved: Path, picture: Path | None) -> None:
    console = Console(highlight=False)
    rows = result.rows()
    if rows:
        console.print(table(result))
        console.print(_meaning(result), style="dim")
    for label, recipe in result.recipes.items():
        if label.startswith("recipe "):
            console.print(f"{label}: {recipe}", markup=False)
    if result.interrupted:
        done = sum(len(result.finished(label)) for label in result.labels)
        console.print(f"stopped after {done} of {len(result.labels) * len(result.seeds)} runs", style="yellow")
    console.print(f"numbers: {saved}", markup=False, soft_wrap=True)
    if picture is not None:
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    elif rows:
        console.print(
            "no picture was drawn, because matplotlib is missing: pip install 'crossgrain[demo]'", markup=False
        )


def table(result: Comparison) -> Table:
    preset, seeds = result.preset, len(result.seeds)
    model = preset.model
    shown = Table(
        title=f"GPT of {model.layers} layers of {model.width}, {preset.steps} steps, {seeds} seed{'s' * (seeds != 1)}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    shown.add_column("recipe", no_wrap=True)
    for title in ("loss", "gap", "verdict", "time", "bytes"):
        shown.add_column(title, justify="left" if title == "verdict" else "right", no_wrap=True)
    for row in result.rows():
        ratios = ("" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in (row.time, row.saved))
        loss = "" if math.isnan(row.loss) else f"{row.loss:.3f}"
        gap = "" if row.paired is None else with_spread(row.paired.gap.mean, row.paired.gap.half_width, "+")
        shown.add_row(row.label, loss, gap, _verdict(row), *ratios, end_section=row.label == BASELINE)
    return shown


def _verdict(row: Row) -> str:
    text = verdict_text(row.verdict, row.paired).replace(" the tolerance", "").replace(" from 0", "")
    return text + (", GROWS" if row.paired is not None and row.paired.grows else "")


def _meaning(result: Comparison) -> str:
    against = "0" if result.tolerance is None else f"the tolerance of {result.tolerance:g}"
    text = (
        "gap: validation loss minus that of fp32 with the same seed, in nats per byte, ± half of its 95 % interval "
        f"over seeds. verdict: t-tests of the gap against {against}; 'not resolved' is not 'no gap'. GROWS: the gap "
        "rises over the steps, so a longer run may have a larger one. time: of a step; bytes: kept for backward; both "
        "relative to fp32."
    )
    for row in result.rows():
        if row.diverged:
            places = ", ".join(f"seed {seed} at step {step}" for seed, step in row.diverged.items())
            text += f" {row.label} diverged: {places}."
    return text
