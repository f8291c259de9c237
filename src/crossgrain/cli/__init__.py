"""The command line program: ``crossgrain`` or ``python -m crossgrain``. There is one file per command; see `app`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command given by the arguments of the program."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The crossgrain command needs {error.name}: pip install 'crossgrain[cli]'")
    from .mistakes import told_in_a_message

    with told_in_a_message():
        app(prog_name="crossgrain")
