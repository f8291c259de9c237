"""What the commands print."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def fail(message: str) -> typer.Exit:
    """To be raised: the message on stderr, and the exit code 1."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    return typer.Exit(1)
