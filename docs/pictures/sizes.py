"""Bytes of 32 numbers in each format: codes, and their share of the scales."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from crossgrain.formats import Format, formats

from .style import GREY, colour_of

NUMBERS = 32


def _code_bits(fmt: Format) -> int:
    assert fmt.element is not None
    return fmt.element.bits


def draw() -> Figure:
    """A bar for each group of formats that cost the same."""
    groups: dict[tuple[float, float], list[str]] = {}
    for fmt in formats():
        if fmt.element is not None:
            codes = NUMBERS * _code_bits(fmt) / 8
            groups.setdefault((NUMBERS * fmt.bits_per_element / 8, codes), []).append(fmt.name)
    groups[64.0, 64.0] = ["bf16"]
    figure, axes = plt.subplots(figsize=(9.2, 0.75 * len(groups) + 0.9))
    for row, ((total, codes), names) in enumerate(sorted(groups.items())):
        colour = colour_of(names[0])
        axes.barh(row, codes, color=colour, height=0.5)
        axes.barh(row, total - codes, left=codes, color=colour, height=0.5, alpha=0.4)
        scale = f" + {total - codes:.1g} of scales" if total > codes else ""
        axes.text(total + 0.8, row, f"{codes:g}{scale}", va="center", fontsize=10)
        axes.text(0, row - 0.4, ", ".join(names), va="bottom", fontsize=8.5, color=GREY)
    axes.set_xlim(0, 74)
    axes.set_ylim(len(groups) - 0.5, -0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"bytes of {NUMBERS} numbers, in one direction")
    return figure
