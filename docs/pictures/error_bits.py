"""What each format loses of the tensors of a trained model, against the bits that it stores."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from crossgrain.formats import get_format

from .style import GREY, colour_of


def draw(errors: dict[str, float]) -> Figure:
    """A line for each format, best first within its cost: many formats cost exactly the same."""
    rows = [(get_format(name).bits_per_element, error, name) for name, error in errors.items()]
    rows.sort(key=lambda row: (round(row[0], 2), row[1]))
    figure, axes = plt.subplots(figsize=(9.2, 0.3 * len(rows) + 1.2))
    y, before = 0.0, rows[0][0]
    for bits, error, name in rows:
        if f"{bits:.2f}" != f"{before:.2f}":
            axes.axhline(y - 0.1, color=GREY, alpha=0.25, linewidth=0.8)
            y += 0.8
        before = bits
        axes.plot([error], [y], marker="o", markersize=8, color=colour_of(name))
        axes.text(error * 1.07, y, f"{name}, {error:.3g} %", va="center", fontsize=9, color=colour_of(name))
        axes.text(-0.012, y, f"{bits:.2f}", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
        y += 1
    axes.set_xscale("log")
    axes.set_xlim(0.8, 40)
    ticks = [1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(y, -1.5)
    axes.set_yticks([])
    axes.text(-0.012, -1.0, "bits", transform=axes.get_yaxis_transform(), ha="right", fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_xlabel("relative error (left is better)")
    return figure
