"""Mistakes of users: what they did is said in a message, not in a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..recipe import RecipeSyntaxError

MISTAKES = (ValueError, TypeError, LookupError, NotImplementedError, RuntimeError, OSError, ImportError)
"""What the library raises for a wrong value, a missing file or package, and the like. Anything else is our bug."""


_HINT = """crossgrain --debug COMMAND ... shows where this was raised. If it is not a
mistake in the command, please report it with the output of crossgrain doctor."""


class Debugging:
    """Whether ``--debug`` was given."""

    on = False


debugging = Debugging()


@contextmanager
def told_in_a_message() -> Iterator[None]:
    """Context manager: a mistake becomes a message on stderr, and the program ends with 1; not with ``--debug``."""
    try:
        yield
    except MISTAKES as error:
        if debugging.on:
            raise
        print(f"crossgrain: {_said(error)}\n\n{_HINT}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def mistakes_are_shown() -> Iterator[None]:
    """Context manager: print an error in a recipe, model or file, and end the program with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if debugging.on:
            traceback.print_exc()
        console = Console(stderr=True, highlight=False)
        text = error.shown(console.width - 8) if isinstance(error, RecipeSyntaxError) else _said(error)
        console.print(text, style="red", markup=False, soft_wrap=isinstance(error, RecipeSyntaxError))
        raise typer.Exit(2) from error


def _said(error: Exception) -> str:
    """The message of an error; of one of the system, the file and what is wrong with it, without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
