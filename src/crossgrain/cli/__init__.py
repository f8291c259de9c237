"""The command line: ``crossgrain`` or ``python -m crossgrain``. One file per command; `app` lists them."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the arguments ask for."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The crossgrain command needs {error.name}: pip install 'crossgrain[cli]'")
    app(prog_name="crossgrain")
