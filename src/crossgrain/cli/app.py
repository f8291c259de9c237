"""The commands."""

from __future__ import annotations

import typer

from .formats import formats
from .warmup import warmup

app = typer.Typer(
    help="Low-precision number formats for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, as Python prints it
)
app.command()(formats)
app.command()(warmup)
