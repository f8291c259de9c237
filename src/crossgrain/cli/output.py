"""Helpers of the commands for printing: text, JSON, errors, progress."""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from crossgrain_command.mistakes import debugging

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: Any) -> None:
    """Print plain data as JSON."""
    typer.echo(json.dumps(value, indent=2))


def print_text(text: str) -> None:
    """Print text. Lines that are too long for the terminal, or for 80 columns without one, go on below, indented."""
    console = Console(highlight=False)
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for part in wrapped or [""]:
            console.print(part, markup=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print the message to stderr, and return an exception to raise, which ends the program with the exit code.

    With ``--debug``, the traceback of the error that is being handled is printed first.
    """
    if debugging.on and sys.exc_info()[1] is not None:
        traceback.print_exc()
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    return typer.Exit(code)


def progress_bar(console: Console | None = None) -> Progress:
    """A progress bar that disappears at the end.

    It is shown on ``console`` if that is a terminal, otherwise on stderr if that is one. Piped output has only results.
    """
    if console is None or not console.is_terminal:
        console = Console(stderr=True)
    columns = (BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True, redirect_stdout=False)


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Context manager: say on stderr what is being done, while it is done, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
