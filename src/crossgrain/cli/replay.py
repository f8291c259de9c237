"""``crossgrain replay``: repeat the step after a checkpoint, and say which operand made it go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor, nn

from ..convert import convert
from ..files import latest_checkpoint
from ..gpt.model import GPT
from ..gpt.training import Trainer, losses_in
from ..lab.replay import MEASURES, ReplayError, ReplayStep
from ..lab.replay import replay as run_replay
from .mistakes import mistakes_are_shown
from .output import AsJson, fail, print_json, print_text, progress_bar
from .recipes import load_recipe
from .user_function import load_function

MeasureName = Enum(  # type: ignore[misc]  # an option has to be an Enum
    "MeasureName", {name: name.replace(" ", "-") for name in ("auto", *MEASURES)}
)
CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a directory of checkpoints: the latest one.")
]
StepFrom = Annotated[
    str | None,
    typer.Option(
        "--step-from",
        "-s",
        metavar="MODULE:FUNCTION",
        help="A function of yours that gets the path and returns a crossgrain.lab.ReplayStep. "
        "Default: a checkpoint of crossgrain train.",
    ),
]
At = Annotated[
    int | None, typer.Option(min=1, help="Train on to this step first, and replay it. Default: the next step.")
]
OtherRecipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", help="Replay the step with another recipe than it was trained with."),
]
Measured = Annotated[MeasureName, typer.Option("--measure", help="What is to be explained.")]
MostRuns = Annotated[int, typer.Option("--runs", min=8, help="The most runs of the step.")]
Loss = Annotated[
    float | None, typer.Option(help="The loss that the training run had in this step, to compare it bit for bit.")
]


def replay(
    checkpoint: CheckpointPath,
    step_from: StepFrom = None,
    at: At = None,
    recipe: OtherRecipe = None,
    measure: Measured = MeasureName.auto,  # type: ignore[attr-defined]
    runs: MostRuns = 64,
    loss: Loss = None,
    as_json: AsJson = False,
) -> None:
    state: Mapping[str, Any] | None = None
    with mistakes_are_shown():
        if step_from is not None:
            step, title = _step_of_user(step_from, checkpoint, at), f"The step of {step_from}, {checkpoint}"
        else:
            trainer = _trainer(checkpoint, at)
            number = len(trainer.run.losses) + 1
            title, state = f"Step {number} of the GPT in {checkpoint}", trainer.random_state
            loss = _recorded_loss(checkpoint, number) if loss is None and recipe is None else loss
            step = ReplayStep(trainer.model, [trainer.next_batch()], _loss_of_gpt, trainer.optimizer, trainer.update)
        if recipe is not None:
            convert(step.model, load_recipe(recipe))
            title += f", with the recipe {recipe}"
    with progress_bar() as progress, mistakes_are_shown():
        bar = progress.add_task("", total=1.0)
        try:
            result = run_replay(
                **vars(step),
                random_state=state,
                measure=measure.name,
                runs=runs,
                expected_loss=loss,
                on_progress=lambda part, text: progress.update(bar, completed=part, description=text),
            )
        except ReplayError as error:
            raise fail(str(error)) from error
    if as_json:
        print_json({"step": title, **result.to_dict()})
    else:
        print_text(f"{title}\n{result}")
    if result.interrupted:
        raise typer.Exit(130)


def _step_of_user(name: str, checkpoint: Path, at: int | None) -> ReplayStep:
    if at is not None:
        raise fail(f"--at is for checkpoints of crossgrain train: {name} decides which step is replayed", code=2)
    made = load_function(name, "--step-from")(checkpoint)
    if not isinstance(made, ReplayStep):
        kind = type(made).__name__
        raise fail(f"--step-from {name}: it must return a crossgrain.lab.ReplayStep, got {kind}", code=2)
    return made


def _trainer(checkpoint: Path, at: int | None) -> Trainer:
    trainer = Trainer.resumed(checkpoint)
    if at is not None:
        trainer.train_to(at - 1)
    return trainer


def _recorded_loss(checkpoint: Path, number: int) -> float | None:
    """The loss of a step, if the run has saved a later checkpoint beside this one."""
    later = latest_checkpoint(checkpoint) or latest_checkpoint(checkpoint.absolute().parent)
    losses = [] if later is None else losses_in(later)
    return losses[number - 1] if len(losses) >= number else None


def _loss_of_gpt(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(model, GPT)
    return model.loss(*batch)
