"""The idea in one picture: the planes that the three GEMMs read, and what each loses in 4 bits, in a trained model."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .measurements import COLUMN, READS, ROW
from .style import BLUE, GREEN, GREY, RED

FORMULAS = {"fprop": "y = x · Wᵀ", "dgrad": "dx = dy · W", "wgrad": "dW = dyᵀ · x"}
COLOURS = {"fprop": BLUE, "dgrad": GREEN, "wgrad": RED}
SYMBOL = {"input": "x", "weight": "W", "grad_output": "dy"}
ARROW = {ROW: "→", COLUMN: "↓"}


def draw(planes: dict[str, list[float]]) -> Figure:
    """A table of errors in colours, under the GEMMs that read the planes."""
    figure, axes = plt.subplots(figsize=(9.6, 1.9 + 0.36 * len(planes)))
    largest, least = max(map(max, planes.values())), min(map(min, planes.values()))
    colours = mpl.colormaps["YlOrRd"]
    for row, (layer, values) in enumerate(planes.items()):
        for column, value in enumerate(values):
            x = column * 1.15 + (column // 2) * 0.45
            share = (value - least) / (largest - least)
            axes.add_patch(Rectangle((x, row), 1.1, 0.92, color=colours(0.08 + 0.8 * share), linewidth=0))
            tone = "white" if share > 0.55 else "#303030"
            axes.text(x + 0.55, row + 0.47, f"{value:.1f} %", ha="center", va="center", color=tone, fontsize=10)
        axes.text(-0.15, row + 0.47, layer, ha="right", va="center", fontsize=10)
    for gemm, (name, pair) in enumerate(READS.items()):
        left, colour = gemm * 2.75, COLOURS[name]
        head: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
        axes.text(left + 1.125, -2.05, name, fontsize=14, fontweight="bold", **head)
        axes.text(left + 1.125, -1.35, FORMULAS[name], fontsize=12, **head)
        axes.plot([left, left + 2.25], [-0.95, -0.95], color=colour, linewidth=2.5)
        for at, (tensor, way) in enumerate(pair):
            axes.text(left + 0.55 + 1.15 * at, -0.45, f"{SYMBOL[tensor]} {ARROW[way]}", fontsize=13, **head)
    axes.text(-0.15, -0.45, "read along rows → or columns ↓", ha="right", va="center", fontsize=10, color=GREY)
    axes.set_xlim(-3.2, 7.85)
    axes.set_ylim(len(planes), -2.6)
    axes.set_axis_off()
    return figure
