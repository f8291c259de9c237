"""Where commands of the lab begin: the small GPT after some training, or a function of the user's."""

from __future__ import annotations

from typing import Annotated

import typer

from ..gpt.training import Preset
from ..lab.gpt_checkpoint import GPTCheckpoint
from ..lab.start import Start
from .output import fail
from .user_function import load_function

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MODULE:FUNCTION",
        help="A function of yours that returns a crossgrain.lab.Start: model, batches, loss and loop. "
        "Default: the small GPT.",
    ),
]
Candidates = Annotated[
    list[str],
    typer.Option(
        "--candidates",
        "-c",
        help="Formats to measure, separated by ';', such as 'nvfp4; nvfp4(rht, sr)'. May be repeated.",
    ),
]
Base = Annotated[str, typer.Option("--base", "-b", help="The recipe that GEMMs stay in if no candidate is chosen.")]

DEFAULT_CANDIDATES = ["nvfp4(2d, rht, sr)"]


def split_candidates(texts: list[str]) -> list[str]:
    """Candidates of texts such as ``nvfp4; nvfp4(sr)``."""
    return [part.strip() for text in texts for part in text.split(";") if part.strip()]


def gpt_checkpoint(preset: Preset) -> GPTCheckpoint:
    """An untrained checkpoint of a size of the small GPT. Its head is measured, too."""
    return GPTCheckpoint(preset.model, preset.batch, preset.learning_rate, include=("head",))


def start_of_user(name: str) -> Start:
    """Call a function of the user's that returns a `Start`; what is wrong ends the program."""
    made = load_function(name, "--from")()
    if not isinstance(made, Start):
        raise fail(f"--from {name}: it must return a crossgrain.lab.Start, got {type(made).__name__}", code=2)
    return made
