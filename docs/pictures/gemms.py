"""The three GEMMs of a linear layer, and which plane of which tensor each one reads."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from crossgrain import Direction

from .idea import COLOURS, FORMULAS
from .measurements import COLUMN, READS, ROW
from .style import GREY

_TENSORS = {"input": "x   [M, K]", "weight": "W   [N, K]", "grad_output": "dy   [M, N]"}
_PLACE = {"input": 0.0, "weight": 3.1, "grad_output": 6.2}
_WIDTH, _HEIGHT, _STRIPES = 1.15, 1.0, 5


def _plane(axes: Axes, x: float, y: float, way: Direction, colour: str) -> None:
    """A matrix with stripes along its blocks."""
    axes.add_patch(Rectangle((x, y), _WIDTH, _HEIGHT, fill=False, edgecolor=colour, linewidth=1.5))
    for index in range(1, _STRIPES):
        share = index / _STRIPES
        if way == ROW:
            axes.plot([x, x + _WIDTH], [y + share * _HEIGHT] * 2, color=colour, linewidth=1, alpha=0.6)
        else:
            axes.plot([x + share * _WIDTH] * 2, [y, y + _HEIGHT], color=colour, linewidth=1, alpha=0.6)
    axes.text(x + _WIDTH / 2, y - 0.14, way.value, ha="center", va="top", fontsize=9, color=colour)


def draw() -> Figure:
    """Three tensors with two planes each, above three GEMMs with two operands each."""
    figure, axes = plt.subplots(figsize=(9.4, 5.0))
    reader = {plane: COLOURS[name] for name, pair in READS.items() for plane in pair}
    for tensor, title in _TENSORS.items():
        left = _PLACE[tensor]
        axes.text(left + 1.3, 4.35, title, ha="center", fontsize=13, fontweight="bold", color=GREY)
        for at, way in enumerate((ROW, COLUMN)):
            _plane(axes, left + 1.45 * at, 3.1, way, reader[tensor, way])
    for gemm, (name, pair) in enumerate(READS.items()):
        left, colour = 0.35 + 3.1 * gemm, COLOURS[name]
        box = Rectangle((left, 0.0), 1.9, 0.95, fill=False, edgecolor=colour, linewidth=2)
        axes.add_patch(box)
        axes.text(left + 0.95, 0.64, name, ha="center", va="center", fontsize=13, fontweight="bold", color=colour)
        axes.text(left + 0.95, 0.27, FORMULAS[name], ha="center", va="center", fontsize=11, color=colour)
        for at, (tensor, way) in enumerate(pair):
            start = _PLACE[tensor] + 1.45 * (way == COLUMN) + _WIDTH / 2
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 2}
            axes.annotate("", (left + 0.55 + 0.8 * at, 0.95), (start, 2.68), arrowprops=arrow)
    axes.set_xlim(-0.1, 9.0)
    axes.set_ylim(-0.1, 4.7)
    axes.set_axis_off()
    return figure
