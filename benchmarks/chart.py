"""One picture of what is measured: layers above, kernels below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import kernels, linear

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOW = 5.0  # kernels that take more copies than this are the reference, and would squeeze the others
SHADES = {
    "crossgrain": ("#6b2414", "#c8553d", "#e8a598", "#f6dcd5"),
    "torchao": ("#3f3f3f", "#7d7d7d", "#b9b9b9", "#dedede"),
}
AMAX, ENCODE, DECODE = "#efc7bd", "#c8553d", "#3b6fb6"
ROW_HEIGHT, MARGINS = 0.36, 1.1  # inches


def draw(layers: Sequence[linear.Timing], timings: Sequence[kernels.Timing], path: Path) -> None:
    """A panel for each of the two, if there is something to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [timing for timing in timings if _is_shown(timing)] or timings
    names = list(dict.fromkeys((t.library, t.name) for t in layers))
    heights = [MARGINS + ROW_HEIGHT * rows for rows in (len(names), len(shown)) if rows]
    if not heights:
        return
    figure, axes = plt.subplots(
        len(heights), figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    panels = iter(axes[:, 0])
    if names:
        _draw_layers(next(panels), names, layers)
    if shown:
        _draw_kernels(next(panels), shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _is_shown(timing: kernels.Timing) -> bool:
    """Every format once, in both directions where there is a choice; E5M2 is like E4M3."""
    one_way = timing.name in ("nvfp4 + SR", "nvfp4 + RHT")
    return (timing.direction == "both" or one_way) and timing.encode < SLOW and "e5m2" not in timing.name


def _draw_layers(axes: Axes, names: Sequence[tuple[str, str]], layers: Sequence[linear.Timing]) -> None:
    shapes = list(dict.fromkeys(t.shape for t in layers))
    width = 0.8 / len(shapes)
    for t in layers:
        index = shapes.index(t.shape)
        y = len(names) - names.index((t.library, t.name)) + 0.4 - width * (index + 0.5)
        shades = SHADES[t.library]
        axes.barh(y, t.ratio, width * 0.9, color=shades[index % len(shades)])
        axes.annotate(f"{t.ratio:.2f}", (t.ratio, y), (3, 0), textcoords="offset points", fontsize=7, va="center")
    for index, shape in enumerate(shapes):
        label = "{} tokens, {} to {} features".format(*shape)
        axes.barh(1, 0, color=SHADES["crossgrain"][index % len(SHADES["crossgrain"])], label=label)
    if any(t.library == "torchao" for t in layers):
        axes.barh(1, 0, color=SHADES["torchao"][1], label="torchao (emulated), the same sizes")
    labels = [name if library == "crossgrain" else f"{library}: {name}" for library, name in names]
    _finish(axes, labels, "one linear layer, forward + backward: multiples of fp32 nn.Linear", "fp32")
    axes.set_xlim(0, 1.55 * max(t.ratio for t in layers))  # the legend stands to the right


def _draw_kernels(axes: Axes, timings: Sequence[kernels.Timing]) -> None:
    places = range(len(timings), 0, -1)
    above, below = [y + 0.19 for y in places], [y - 0.19 for y in places]
    amax = [t.amax for t in timings]
    axes.barh(above, amax, 0.36, color=AMAX, label="amax pass")
    axes.barh(above, [t.encode for t in timings], 0.36, left=amax, color=ENCODE, label="encode")
    axes.barh(below, [t.decode for t in timings], 0.36, color=DECODE, label="decode")
    labels = [f"{t.name}, {t.direction}" for t in timings]
    _finish(axes, labels, "kernels: multiples of an fp32 copy of the same matrix", "a copy")


def _finish(axes: Axes, labels: Sequence[str], title: str, unit: str) -> None:
    axes.set_title(f"{title} (one thread)", loc="left", fontsize=10, pad=14)
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.annotate(unit, (1.0, 1.0), (0, 3), ("data", "axes fraction"), "offset points", fontsize=8, ha="center")
    axes.set_yticks(range(len(labels), 0, -1), labels, fontsize=8)
    axes.set_ylim(0.4, len(labels) + 0.6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
