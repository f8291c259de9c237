"""The list of all commands of the ``crossgrain`` program."""

from __future__ import annotations

from typing import Annotated

import typer

from .compare import compare
from .doctor import doctor
from .explain import explain
from .export import export
from .formats import formats
from .imports import import_modules
from .inspect import inspect
from .plan import plan
from .replay import replay
from .search import search
from .sensitivity import sensitivity
from .train import train
from .warmup import warmup

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, as Python prints it
)
Modules = Annotated[
    list[str],
    typer.Option("--import", metavar="MODULE", help="Import this first: a module that registers formats; repeatable."),
]


@app.callback()
def before_every_command(modules: Modules = []) -> None:  # noqa: B006  # typer copies it
    """Low-precision training with a number format for each direction of each tensor."""
    import_modules(modules)


for command in (compare, train, inspect, sensitivity, search, replay, explain, plan, export, formats, warmup, doctor):
    app.command()(command)
