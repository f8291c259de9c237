"""The start of the ``crossgrain`` program: its options, the list of its commands and their help.

It is a package of its own because importing anything of ``crossgrain`` imports torch, which takes seconds. Here torch
is imported when a command runs, so that ``--help``, ``--version`` and the completion of a shell do without.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command given by the arguments of the program."""
    try:
        import rich  # noqa: F401  # commands print with it; here the message is the same for both packages

        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The crossgrain command needs {error.name}: pip install 'crossgrain[cli]'")
    from .mistakes import told_in_a_message

    with told_in_a_message():
        app(prog_name="crossgrain")
