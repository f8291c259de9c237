"""What the commands print."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def fail(message: str, code: int = 1) -> typer.Exit:
    """To be raised: the message on stderr, and the exit code."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    return typer.Exit(code)


def progress_bar(console: Console | None = None) -> Progress:
    """Gone when it is done. On ``console`` if that is a terminal, else on stderr if that is one.

    What is piped is the result alone.
    """
    if console is None or not console.is_terminal:
        console = Console(stderr=True)
    columns = (BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True, redirect_stdout=False)
