"""Mistakes of users: what they did is said in a message, not in a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MISTAKES = (ValueError, TypeError, LookupError, NotImplementedError, RuntimeError, OSError, ImportError)
"""What the library raises for a wrong value, a missing file or package, and the like. Anything else is our bug."""


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
        said = str(error) or type(error).__name__
        hint = (
            "crossgrain --debug COMMAND ... shows where this was raised. If it is not a mistake in the command, please"
        )
        print(f"crossgrain: {said}\n\n{hint} report it with the output of crossgrain doctor.", file=sys.stderr)
        sys.exit(1)
