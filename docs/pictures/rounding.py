"""What is left of the error of a gradient in NVFP4 when it is averaged over steps: noise averages out, bias stays."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .measurements import DRAWS
from .style import BLUE, GREY, RED


def draw(errors: dict[str, list[float]]) -> Figure:
    """Both ways to round, over the number of steps."""
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    for (name, found), colour in zip(errors.items(), (RED, BLUE), strict=True):
        axes.plot(DRAWS, found, marker="o", color=colour)
        axes.text(DRAWS[-1] * 1.1, found[-1], f"{name}: {found[-1]:.1f} %", color=colour, va="center", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(DRAWS, [str(each) for each in DRAWS])
    axes.set_yticks([2, 5, 10, 20], ["2 %", "5 %", "10 %", "20 %"])
    axes.minorticks_off()
    axes.set_xlim(0.9, 260)
    axes.grid(axis="y")
    axes.set_xlabel("quantizations of the same gradient that are averaged")
    axes.set_ylabel("error of the mean", color=GREY)
    return figure
