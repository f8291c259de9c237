"""Mistakes of users in what a command reads: they are said in a message, not in a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from crossgrain_command.mistakes import debugging, message_of

from ..recipe import RecipeSyntaxError


@contextmanager
def mistakes_are_shown() -> Iterator[None]:
    """Context manager: print an error in a recipe, model or file, and end the program with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if debugging.on:
            traceback.print_exc()
        console = Console(stderr=True, highlight=False)
        text = error.shown(console.width - 8) if isinstance(error, RecipeSyntaxError) else message_of(error)
        console.print(text, style="red", markup=False, soft_wrap=isinstance(error, RecipeSyntaxError))
        raise typer.Exit(2) from error
