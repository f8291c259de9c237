"""The error of a module whose program is not installed."""

from __future__ import annotations


def not_installed(package: str, extra: str, error: ImportError) -> ImportError:
    """An ImportError that says what to install.

    Args:
        package: the program that is missing.
        extra: the extra of crossgrain that installs it.
        error: what the import has raised.
    """
    return ImportError(f"{package} could not be imported ({error}). Install it with: pip install 'crossgrain[{extra}]'")
