"""The list of all commands of the ``crossgrain`` program."""

from __future__ import annotations

import typer

from .compare import compare
from .explain import explain
from .formats import formats
from .plan import plan
from .train import train
from .warmup import warmup

app = typer.Typer(
    help="Low-precision training with a separate number format for each direction of each tensor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, as Python prints it
)
for command in (compare, train, explain, plan, formats, warmup):
    app.command()(command)
