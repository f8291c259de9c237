"""``crossgrain formats``: list all registered number formats."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..formats import Format
from ..formats import formats as registered_formats
from .output import AsJson, print_json

_SCALES = {
    "none": "-",
    "fp32": "fp32",
    "e8m0_up": "E8M0, rounded up",
    "e8m0_floor": "E8M0, OCP rule",
}


def formats(as_json: AsJson = False) -> None:
    rows = [describe(fmt) for fmt in registered_formats()]
    if as_json:
        print_json(rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "element", "block", "scale"):
        table.add_column(title, no_wrap=True)
    for title in ("bits", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        block = "x".join(map(str, row["block"])) if row["block"] else ("tensor" if row["element"] else "-")
        amax = f", amax per {row['amax_per']}" if row["amax_per"] else ""
        maximum = "-" if row["max"] is None else f"{row['max']:.5g}"
        scale = _SCALES.get(row["scale"], str(row["scale_element"]).upper()) + amax
        table.add_row(row["name"], row["element"] or "-", block, scale, f"{row['bits_per_element']:.2f}", maximum)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "bits: stored bits per element, including scales. max: the largest element, before scaling.", style="dim"
    )


def describe(fmt: Format) -> dict[str, Any]:
    """The properties of a format as plain data."""
    return {
        "name": fmt.name,
        "element": fmt.element and fmt.element.name,
        "block": fmt.block,
        "scale": fmt.scale_rule,
        "scale_element": fmt.scale_element.name if fmt.scale_rule == "two_level" else None,
        "amax_per": fmt.global_amax,
        "bits_per_element": fmt.bits_per_element,
        "max": fmt.element and fmt.element.max,
    }
