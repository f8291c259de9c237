"""Times of a linear layer, read from the table of the page about speed, so that there is one place for the numbers."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .style import AMBER, BLUE, GREEN, GREY

PAGE = Path(__file__).parents[1] / "explanation" / "speed.md"


def table(page: str) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Sizes, and a row of times for each recipe."""
    lines = page[page.index("## Linear layers") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    body = []
    for name, *cells in rows[2:]:
        if not all(re.fullmatch(r"\d\.\d\d", cell) for cell in cells):
            break
        body.append((name, [float(cell) for cell in cells]))
    return rows[0][1:], body


def draw() -> Figure:
    """Bars for each recipe, with a line where fp32 is."""
    sizes, rows = table(PAGE.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(6.6, 0.66 * len(rows) + 1.0))
    for index, (name, times) in enumerate(rows):
        for size, (time, colour) in enumerate(zip(times, (GREEN, BLUE, AMBER), strict=True)):
            y = index + 0.24 * (size - 1)
            axes.barh(y, time, height=0.22, color=colour, label=sizes[size] if index == 0 else None)
            axes.text(time + 0.05, y, f"{time:.2f}", va="center", fontsize=8.5)
        axes.text(-0.08, index, textwrap.fill(name, 34), ha="right", va="center", fontsize=10)
    axes.axvline(1, color=GREY, linewidth=1, linestyle="--")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("time of forward and backward, in multiples of fp32 nn.Linear")
    axes.legend(title="tokens x in x out", loc="upper right", fontsize=9, title_fontsize=9)
    return figure
