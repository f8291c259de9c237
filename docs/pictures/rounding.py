"""What is left of the error of a gradient in NVFP4 when it is averaged over steps: noise averages out, bias stays."""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

import crossgrain as cg

from .style import BLUE, GREY, RED

DRAWS = (1, 2, 4, 8, 16, 32, 64)


def averaged_errors(x: Tensor, text: str) -> list[float]:
    """Relative errors, in percent, of the mean of so many quantizations of one tensor."""
    torch.manual_seed(0)
    quantizer = cg.quantizer_for(text, columnwise=False)
    total, found = torch.zeros_like(x, dtype=torch.float64), []
    for draw in range(1, max(DRAWS) + 1):
        total += quantizer(x).dequantize(dtype=torch.float32).double()
        if draw in DRAWS:
            found.append(100 * float((total / draw - x.double()).norm() / x.double().norm()))
    return found


def draw(gradient: Tensor) -> Figure:
    """Both ways to round, over the number of steps."""
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    for text, name, colour in (("nvfp4", "to nearest", RED), ("nvfp4(sr)", "stochastically", BLUE)):
        found = averaged_errors(gradient, text)
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
