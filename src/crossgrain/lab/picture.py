"""Draw a comparison: validation loss by step, and below it the difference to fp32."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .compare import BASELINE, Comparison
from .intervals import Estimate, estimate, with_spread

_COLOURS = ("#c8553d", "#3b6fb6", "#4c8c4a", "#8c5fa8", "#c49a2a", "#3f9c9c", "#b3587f", "#7a7a52")
_FP32 = "#222222"

Curve = Sequence[tuple[int, float]]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a comparison to a PNG file.

    Lines are means over seeds. Bands reach from the lowest to the highest seed. Gaps at the end have 95 % intervals
    over seeds.
    """
    figure, (losses, gaps) = plt.subplots(
        2, 1, figsize=(9, 7.6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    ends = []
    for label, colour in zip(comparison.labels, (_FP32, *_repeated(len(comparison.recipes))), strict=True):
        runs = comparison.finished(label)
        if not runs:
            continue
        style: dict[str, Any] = {"color": colour, "zorder": 5 if label == BASELINE else 3}
        _draw(losses, [run.validation for run in runs.values()], style, label)
        curves = list(comparison.gaps(label).values())
        if curves and label != BASELINE:
            _draw(gaps, curves, style, label)
            ends.append((estimate([curve[-1][1] for curve in curves]), label, colour))
    gaps.axhline(0, color=_FP32, linewidth=1.5)
    _dress(comparison, losses, gaps)
    _label_ends(gaps, ends, comparison.preset.steps)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _repeated(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _draw(axes: Axes, curves: Sequence[Curve], style: dict[str, Any], label: str) -> None:
    steps = [step for step, _ in curves[0]]
    by_step = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
    axes.plot(steps, [statistics.mean(values) for values in by_step], linewidth=1.8, label=label, **style)
    if len(curves) > 1:
        low, high = [min(values) for values in by_step], [max(values) for values in by_step]
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.13, linewidth=0)


def _label_ends(axes: Axes, ends: list[tuple[Estimate, str, str]], steps: int) -> None:
    """Write names and gaps beside the last points, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    distance = 0.075 * (high - low)
    place = -float("inf")
    for gap, label, colour in sorted(ends, key=lambda end: end[0].mean):
        place = max(gap.mean, place + distance)
        axes.annotate(
            f"{label}  {with_spread(gap.mean, gap.half_width, '+')}",
            (steps, gap.mean),
            (1.02, place),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)},
            color=colour,
            va="center",
            fontsize=9,
        )


def _dress(comparison: Comparison, losses: Axes, gaps: Axes) -> None:
    model, count = comparison.preset.model, len(comparison.seeds)
    losses.set_title(
        f"Byte-level GPT, {model.layers} layers of {model.width}: validation loss by recipe",
        loc="left",
        fontweight="bold",
    )
    losses.set_ylabel("nats per byte")
    losses.legend(frameon=False, fontsize=9)
    gaps.set_title(f"gap to fp32 with the same seed; {count} seed{'s' * (count != 1)}", loc="left", fontsize=10)
    gaps.set_ylabel("nats per byte")
    gaps.set_xlabel("steps")
    gaps.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, gaps):
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
