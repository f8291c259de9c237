"""The list of all commands of the ``crossgrain`` program."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import typer

from .compare import compare
from .doctor import doctor
from .explain import explain
from .export import export
from .formats import formats
from .imports import import_modules
from .inspect import inspect
from .mistakes import debugging
from .plan import plan
from .replay import replay
from .search import search
from .sensitivity import sensitivity
from .train import train
from .warmup import warmup


class Command(NamedTuple):
    """A command, and examples of its use."""

    run: Callable[..., Any]
    examples: tuple[str, ...]


COMMANDS: dict[str, tuple[Command, ...]] = {
    "Recipes and formats": (
        Command(
            explain,
            (
                "crossgrain explain --recipe mxfp8-fwd-nvfp4-bwd",
                "crossgrain explain --recipe 'nvfp4; head: hp' --model small",
            ),
        ),
        Command(formats, ("crossgrain formats", "crossgrain --import my_formats formats --json")),
    ),
    "On a small GPT": (
        Command(compare, ("crossgrain compare --recipes mxfp8,nvfp4 --size tiny",)),
        Command(train, ("crossgrain train --recipe mxfp8 --size small --save run",)),
    ),
    "Which recipe for your model": (
        Command(sensitivity, ("crossgrain sensitivity --from train:start",)),
        Command(search, ("crossgrain search --from train:start --minutes 30",)),
        Command(plan, ("crossgrain plan --model llama3-70b --recipe mxfp8-fwd-nvfp4-bwd --gpus 64 --device b200",)),
    ),
    "A run that went wrong": (
        Command(
            inspect,
            ("crossgrain inspect stats.jsonl", "crossgrain inspect --recipe nvfp4 --steps 100 --what-if mxfp8"),
        ),
        Command(replay, ("crossgrain replay run/step-00000040 --at 47",)),
    ),
    "Inference": (
        Command(
            export,
            ("crossgrain export served --hf Llama-3.2-1B --checkpoint run --format compressed-tensors",),
        ),
    ),
    "This machine": (
        Command(doctor, ("crossgrain doctor", "crossgrain doctor --json > report.json")),
        Command(warmup, ("crossgrain warmup", "crossgrain warmup --recipe mxfp8")),
    ),
}
"""All commands by what they are for, in the order of the help."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, as Python prints it
    epilog="Ends with 0 if all is well, 1 if something failed or the answer is no, 2 if the command is wrong, and "
    "130 if it was stopped.",
)
Modules = Annotated[
    list[str],
    typer.Option("--import", metavar="MODULE", help="Import this first: a module that registers formats; repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error was raised, as a Python traceback.")]


@app.callback()
def before_every_command(modules: Modules = [], debug: Debug = False) -> None:  # noqa: B006  # typer copies it
    """Low-precision training with a number format for each direction of each tensor."""
    debugging.on = debug
    import_modules(modules)


def _paragraphs(run: Callable[..., Any]) -> str:
    """The docstring with a line for each paragraph, which the terminal breaks where it ends."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(run.__doc__ or "").split("\n\n"))


for panel, commands in COMMANDS.items():
    for command in commands:
        lines = "\n\n".join(command.examples)
        app.command(rich_help_panel=panel, help=_paragraphs(command.run), epilog=f"Examples:\n\n{lines}")(command.run)
