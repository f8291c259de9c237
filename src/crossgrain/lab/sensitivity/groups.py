"""Groups of layers that are measured together in dgrad, and that move together in a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Grouping = str | Callable[[str], str]

GROUPINGS = ("layer", "block", "kind")


def groups_of(layers: Iterable[str], grouping: Grouping) -> dict[str, list[str]]:
    """The layers of each group.

    Args:
        layers: names of layers.
        grouping: "layer": each layer by itself; "block": all layers of a numbered block, such as ``model.layers.3``;
            "kind": layers whose names differ only in numbers, such as ``model.layers.*.mlp.up_proj``; or a function
            from the name of a layer to that of its group.

    Raises:
        ValueError: there is no such grouping.
        TypeError: a function returned something else than text.
    """
    if isinstance(grouping, str) and grouping not in GROUPINGS:
        raise ValueError(f"groups must be {', '.join(GROUPINGS)} or a function, got {grouping!r}")
    found: dict[str, list[str]] = {}
    for layer in layers:
        name = _named(layer, grouping) if isinstance(grouping, str) else grouping(layer)
        if not isinstance(name, str):
            raise TypeError(f"groups must return the name of a group, but returned {name!r} for {layer}")
        found.setdefault(name, []).append(layer)
    return found


def _named(layer: str, grouping: str) -> str:
    if grouping == "block":
        block = re.match(r"(?:.*?\.)??\d+(?=\.|$)", layer)
        return block[0] if block else layer
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer) if grouping == "kind" else layer
