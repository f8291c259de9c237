"""How the tables are written."""

from __future__ import annotations

from typing import Any

Entry = str | dict[str, Any]
"""The dotted name of the module that serves, or the names of a facade."""


def these(module: str, *names: str, **renamed: str) -> dict[str, str]:
    """``names`` of a module of crossgrain as they are, and others under new names."""
    return {name: f"{module}:{name}" for name in names} | {ours: f"{module}:{name}" for ours, name in renamed.items()}


TEX = these("crossgrain.compat", tex="transformer_engine_torch")
"""The extension under the name by which modules know it."""
