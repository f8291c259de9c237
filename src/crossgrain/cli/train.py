"""``crossgrain train``: train a small GPT on Python's documentation with one recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..files import latest_checkpoint
from ..gpt.training import Run, Trainer
from .mistakes import mistakes_are_shown
from .output import AsJson, fail, print_json, progress_bar
from .recipes import RecipeText, load_schedule
from .sizes import Size, SizeName, Steps, preset_of

Save = Annotated[
    Path | None, typer.Option("--save", metavar="DIR", help="Save checkpoints there, for crossgrain replay.")
]
SaveEvery = Annotated[int | None, typer.Option(min=1, help="Save every so many steps; default: ten times.")]


def train(
    recipe: RecipeText = "mxfp8",
    size: Size = SizeName.tiny,  # type: ignore[attr-defined]
    steps: Steps = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights, the data and stochastic rounding.")] = 0,
    save: Save = None,
    save_every: SaveEvery = None,
    as_json: AsJson = False,
) -> None:
    preset, loaded = preset_of(size, steps), load_schedule(recipe)
    every = save_every or max(1, preset.steps // 10)
    if save_every is not None and save is None:
        raise fail("--save-every needs --save, the directory for the checkpoints", code=2)
    with mistakes_are_shown():
        if save is not None and latest_checkpoint(save) is not None:
            raise fail(f"--save {save}: there are checkpoints of another run. Choose another directory", code=2)
        trainer = Trainer(preset, loaded, seed)
    console = Console(highlight=False)
    if not as_json:
        console.print(f"recipe: {trainer.run.recipe}", markup=False)
        console.print(" step   training   validation   (loss in nats per byte)", style="bold")

    with progress_bar(None if as_json else console) as progress:
        task = progress.add_task("", total=preset.steps)

        def on_step(run: Run) -> None:
            done = len(run.losses)
            if save is not None and (done % every == 0 or done == preset.steps):
                with mistakes_are_shown():
                    trainer.save(save)
            progress.update(task, completed=done, description=f"loss {run.losses[-1]:.3f}")
            if not as_json and run.validation and run.validation[-1][0] == done:
                console.print(f"{done:5d} {run.losses[-1]:10.4f} {run.validation[-1][1]:12.4f}")

        run = trainer.train(on_step)

    if as_json:
        print_json({**asdict(run), "validation_loss": run.validation_loss, "seconds_per_step": run.seconds_per_step})
    else:
        end = "stopped" if run.interrupted else "done"
        console.print(
            f"{end} after {len(run.losses)} steps: validation loss {run.validation_loss:.4f}, "
            f"{1000 * run.seconds_per_step:.0f} ms per step, {run.saved_bytes / 2**20:.1f} MiB kept for backward"
        )
    if run.interrupted:
        raise typer.Exit(130)
