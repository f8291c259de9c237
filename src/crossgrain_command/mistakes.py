"""Mistakes of users: what they did is said in a message, not in a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
        print(f"crossgrain: {message_of(error)}\n\n{_HINT}", file=sys.stderr)
        sys.exit(1)


def message_of(error: Exception) -> str:
    """The message of an error; of one of the system, the file and what is wrong with it, without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
