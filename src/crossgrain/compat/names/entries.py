"""Helpers to write the tables of names."""

from __future__ import annotations

from typing import Any

Entry = str | dict[str, Any]
"""The dotted name of the module of crossgrain to use, or the table of a `Facade`."""


def these(module: str, *names: str, **renamed: str) -> dict[str, str]:
    """A table of ``names`` of a module of crossgrain; ``renamed`` gives names that differ: new name = old name."""
    return {name: f"{module}:{name}" for name in names} | {ours: f"{module}:{name}" for ours, name in renamed.items()}


TEX = these("crossgrain.compat", tex="transformer_engine_torch")
"""The compiled extension, under the name ``tex`` that modules use."""
