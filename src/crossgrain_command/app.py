"""The ``crossgrain`` program: its options, and the list of all its commands with their help."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from .mistakes import debugging


class Command(NamedTuple):
    """A command: a function in the module of the same name in ``crossgrain.cli``."""

    name: str
    help: str
    examples: tuple[str, ...]

    def load(self) -> Any:
        """The command of typer with its arguments and options. It imports torch."""
        run: Callable[..., Any] = getattr(importlib.import_module(f"crossgrain.cli.{self.name}"), self.name)
        alone = typer.Typer(add_completion=False)
        lines = "\n\n".join(self.examples)
        alone.command(self.name, help=self.help, epilog=f"Examples:\n\n{lines}")(run)
        return typer.main.get_command(alone)


COMMANDS: dict[str, tuple[Command, ...]] = {
    "Recipes and formats": (
        Command(
            "explain",
            "Show which format each GEMM reads, layer by layer, and which part of the recipe decides it; for each "
            "phase.",
            (
                "crossgrain explain --recipe mxfp8-fwd-nvfp4-bwd",
                "crossgrain explain --recipe 'nvfp4; head: hp' --model small",
            ),
        ),
        Command(
            "formats",
            "List all registered formats: their elements, blocks and scales.",
            ("crossgrain formats", "crossgrain --import my_formats formats --json"),
        ),
    ),
    "On a small GPT": (
        Command(
            "compare",
            "Train the same small GPT with several recipes and in fp32, and compare loss, time and memory."
            "\n\nCtrl-C stops it and keeps the finished runs.",
            ("crossgrain compare --recipes mxfp8,nvfp4 --size tiny",),
        ),
        Command(
            "train",
            "Train a small byte-level GPT with a recipe, and print its validation loss."
            "\n\nCtrl-C stops it and prints the results so far.",
            ("crossgrain train --recipe mxfp8 --size small --save run",),
        ),
    ),
    "Which recipe for your model": (
        Command(
            "sensitivity",
            "Measure what each format costs at each GEMM of each layer, at one checkpoint."
            "\n\nWith --from it measures your model: crossgrain sensitivity --from train:start. Otherwise the small "
            "GPT is trained in fp32 first. Ctrl-C stops it and keeps what is there; the next call goes on.",
            ("crossgrain sensitivity --from train:start",),
        ),
        Command(
            "search",
            "Find a recipe: measure each GEMM of each layer, search, verify the recipe by paired training, and write "
            "a report."
            "\n\nWith --from it is for your model: crossgrain search --from train:start --saving 0.8. Otherwise for "
            "the small GPT, which is trained in fp32 first, and whose GEMMs are priced as if it were 4096 wide.",
            ("crossgrain search --from train:start --minutes 30",),
        ),
        Command(
            "plan",
            "Estimate the memory, communication and time of a training step on GPUs that need not be there."
            "\n\nSizes are exact, times follow from published peak rates. All assumptions are printed.",
            ("crossgrain plan --model llama3-70b --recipe mxfp8-fwd-nvfp4-bwd --gpus 64 --device b200",),
        ),
    ),
    "A run that went wrong": (
        Command(
            "inspect",
            "Show the errors of all tensors in each direction, and the first bad step, of a run with an Inspector."
            "\n\nWithout a file, a small GPT is trained and looked at. Columns: the GEMM that reads the plane, the "
            "layer, x, W or dy, its format, its signal-to-noise ratio in dB, its bias (the part of the error that "
            "does not average out over steps, relative), the share of numbers that became zero, and the share that "
            'was cut off. "!" marks NaNs and infinities.',
            ("crossgrain inspect stats.jsonl", "crossgrain inspect --recipe nvfp4 --steps 100 --what-if mxfp8"),
        ),
        Command(
            "replay",
            "Repeat a step bit for bit, then with operands in high precision, and say which operand makes the "
            "difference."
            "\n\nFor training programs of yours: crossgrain replay run/checkpoints --step-from train:step. Ctrl-C "
            "stops it and prints what is known.",
            ("crossgrain replay run/step-00000040 --at 47",),
        ),
    ),
    "Inference": (
        Command(
            "export",
            "Write a Hugging Face model, trained with a recipe, for an inference engine."
            "\n\nThe codes and scales are those that the layers multiply, byte for byte.",
            ("crossgrain export served --hf Llama-3.2-1B --checkpoint run --format compressed-tensors",),
        ),
    ),
    "This machine": (
        Command(
            "doctor",
            "Say what this machine can do: versions, CPU, GPUs, kernels, settings; and compare golden vectors."
            "\n\nEnds with 0 if all is well, and with 1 if something is broken.",
            ("crossgrain doctor", "crossgrain doctor --json > report.json"),
        ),
        Command(
            "warmup",
            "Compile CPU kernels and store them in the cache on disk: all of them, or those that recipes need."
            "\n\nAll take about a minute and a half the first time, those of a recipe some seconds. What the cache "
            "has already is not compiled again. Example: crossgrain warmup --recipe mxfp8-fwd-nvfp4-bwd",
            ("crossgrain warmup", "crossgrain warmup --recipe mxfp8"),
        ),
    ),
}
"""All commands by what they are for, in the order of the help."""

_BY_NAME = {command.name: command for commands in COMMANDS.values() for command in commands}


class _Group(TyperGroup):
    """Has names and help of the commands, and loads the one that the arguments name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _BY_NAME[name].load() if name in _BY_NAME else None, rest


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, as Python prints it
    epilog="Ends with 0 if all is well, 1 if something failed or the answer is no, 2 if the command is wrong, and "
    "130 if it was stopped.",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"crossgrain {importlib.metadata.version('crossgrain')}")
        raise typer.Exit


Modules = Annotated[
    list[str],
    typer.Option("--import", metavar="MODULE", help="Import this first: a module that registers formats; repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error was raised, as a Python traceback.")]
Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


@app.callback()
def before_every_command(
    modules: Modules = [],  # noqa: B006  # typer copies it
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Low-precision training with a number format for each direction of each tensor."""
    debugging.on = debug
    if modules:
        from crossgrain.cli.imports import import_modules

        import_modules(modules)


def _only_named() -> None:
    """What the group has of a command before it is loaded."""


for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.name, rich_help_panel=panel, help=command.help)(_only_named)
