"""``crossgrain inspect``: what quantization does to the tensors of a run, from a file or of a small GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..gpt.training import Run, Trainer
from ..lab.inspect import Inspection, Inspector, read_inspection
from .mistakes import mistakes_are_shown
from .output import AsJson, fail, print_json, print_text, progress_bar
from .recipes import load_schedule, split_recipes
from .sizes import SizeName, Steps, preset_of

File = Annotated[Path | None, typer.Argument(help="A file that crossgrain.lab.Inspector has written.")]
Recipe = Annotated[
    str | None, typer.Option("--recipe", "-r", help="Without a file: train a small GPT with this recipe.")
]
Size = Annotated[SizeName | None, typer.Option("--size", help="Without a file: size of the GPT. Default: tiny.")]
WhatIf = Annotated[
    list[str] | None,
    typer.Option("--what-if", help="Without a file: formats or recipes that are not in use, separated by commas."),
]
Every = Annotated[
    int | None, typer.Option(min=1, help="Without a file: look every so many steps. Default: a tenth of the steps.")
]
Out = Annotated[Path | None, typer.Option(help="Without a file: a file of JSON lines to append all looks to.")]
Step = Annotated[int | None, typer.Option("--step", help="The step of the look to show; default: the last.")]
Top = Annotated[int, typer.Option(min=1, help="Number of planes to show for each GEMM.")]
All = Annotated[bool, typer.Option("--all", help="Show all planes.")]


def inspect(
    file: File = None,
    recipe: Recipe = None,
    size: Size = None,
    steps: Steps = None,
    what_if: WhatIf = None,
    every: Every = None,
    out: Out = None,
    step: Step = None,
    top: Top = 8,
    show_all: All = False,
    as_json: AsJson = False,
) -> None:
    of_training = {
        "--recipe": recipe,
        "--size": size,
        "--steps": steps,
        "--what-if": what_if,
        "--every": every,
        "--out": out,
    }
    interrupted = False
    if file is None:
        seen, interrupted = _trained(recipe or "mxfp8-fwd-nvfp4-bwd", size, steps, what_if or [], every, out, as_json)
    else:
        given = [name for name, value in of_training.items() if value is not None]
        if given:
            raise fail(f"{', '.join(given)} cannot be combined with a file, whose run is over: leave out one", 2)
        with mistakes_are_shown():
            seen = read_inspection(file)
    with mistakes_are_shown():
        if as_json:
            print_json(seen.to_dict(step))
        else:
            print_text(seen.text(step, None if show_all else top))
    if interrupted:
        raise typer.Exit(130)


def _trained(
    recipe: str,
    size: SizeName | None,
    steps: int | None,
    what_if: list[str],
    every: int | None,
    out: Path | None,
    quiet: bool,
) -> tuple[Inspection, bool]:
    """Train a small GPT and look at it; also return whether it was interrupted."""
    preset = preset_of(SizeName.tiny if size is None else size, steps)  # type: ignore[attr-defined]
    loaded = load_schedule(recipe)
    with mistakes_are_shown():
        trainer = Trainer(preset, loaded, seed=0)
        # The first step is not looked at: before it, the trainer measures memory with a pass of its own.
        look = Inspector(
            trainer.model,
            out,
            every=every or max(1, preset.steps // 10),
            what_if=split_recipes(what_if),
            first_step=1,
        )
    console = Console(highlight=False)
    if not quiet:
        console.print(f"recipe: {trainer.run.recipe}", markup=False)
    with progress_bar(None if quiet else console) as progress:
        task = progress.add_task("", total=preset.steps)

        def on_step(run: Run) -> None:
            done = len(run.losses)
            progress.update(task, completed=done, description=f"loss {run.losses[-1]:.3f}")
            if done == 1:
                look.open()
            else:
                look.step()

        run = trainer.train(on_step)
    look.close()
    report = look.report()
    return (report if out is None else read_inspection(out)), run.interrupted
