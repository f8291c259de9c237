"""``crossgrain --import my_formats ...``: modules of the user, which register formats, before a command runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from .output import fail


def import_modules(names: Sequence[str], option: str = "--import") -> None:
    """Import each; what goes wrong ends the program, with the name of the module. The current directory counts."""
    here = str(Path.cwd())
    if names and here not in sys.path:
        sys.path.insert(0, here)  # as ``python -m`` does, and an installed command does not
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            reason = f"there is no such module in {here} or on Python's path" if missing else _told(error)
            raise fail(f"{option} {name}: {reason}", code=2) from error


def _told(error: Exception) -> str:
    return f"importing it raised {type(error).__name__}: {error}"
