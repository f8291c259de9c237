"""What each format does to one matrix: a table of errors on the terminal, and a picture in ``out/``.

The matrix looks like activations: normal numbers, and a few columns that are much larger. A rowwise
block runs across columns, so an outlier sets the scale of its ordinary neighbours: it is kept well
itself, and they suffer. A columnwise block stays within a column. So the two directions of one tensor
can lose different amounts; in the MX formats the more, the fewer exponent bits an element has.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no display

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator
from rich.console import Console
from rich.table import Table
from torch import Tensor

import crossgrain as cg
from crossgrain.formats import formats

FAMILIES = {"fp8": "#3b6fb6", "mx": "#c8553d", "nvfp4": "#4c8c4a", "hifloat8": "#8a5fb0", "identity": "#555555"}
OTHERS = "#999999"  # formats that someone registered


@dataclass(frozen=True)
class Result:
    """How well one format keeps the matrix, by direction; errors are relative (Frobenius)."""

    name: str
    bits: float
    rowwise_error: float
    columnwise_error: float

    @property
    def rowwise_snr(self) -> float:
        return snr(self.rowwise_error)

    @property
    def columnwise_snr(self) -> float:
        return snr(self.columnwise_error)

    @property
    def mean_snr(self) -> float:
        return (self.rowwise_snr + self.columnwise_snr) / 2

    @property
    def cost(self) -> str:
        """The bits as they are printed; formats with the same cost are compared with each other."""
        return f"{self.bits:.2f}"

    @property
    def colour(self) -> str:
        return next((colour for family, colour in FAMILIES.items() if self.name.startswith(family)), OTHERS)


def snr(relative_error: float) -> float:
    """Signal to noise in dB; infinite where nothing was lost."""
    return -20.0 * math.log10(relative_error) if relative_error else math.inf


def activations(size: int) -> Tensor:
    """[size, size] bf16: normal, with one column in 64 about ten times larger."""
    generator = torch.Generator().manual_seed(2024)
    x = torch.randn(size, size, generator=generator)
    outliers = torch.randperm(size, generator=generator)[: size // 64]
    x[:, outliers] *= torch.empty(len(outliers)).uniform_(6.0, 14.0, generator=generator)
    return x.to(torch.bfloat16)


def nvfp4_variants() -> dict[str, Callable[[Tensor], cg.QuantizedTensor]]:
    """NVFP4 with a Hadamard rotation (of columnwise blocks), stochastic rounding, or two scales to choose from."""
    return {
        "nvfp4 + RHT": cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        "nvfp4 + SR": cg.NVFP4Quantizer(stochastic_rounding=True),
        "nvfp4 + RHT + SR": cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
        "nvfp4 + 4-over-6": cg.NVFP4Quantizer(nvfp4_use_4over6=True),
    }


def measure_all(x: Tensor) -> list[Result]:
    """Every registered format and the variants, cheapest first, then from best to worst."""
    quantized = {fmt.name: cg.quantize(x, fmt.name) for fmt in formats()}
    quantized |= {name: quantize(x) for name, quantize in nvfp4_variants().items()}
    results = [measure(name, q, x) for name, q in quantized.items()]
    return sorted(results, key=lambda result: (result.cost.zfill(6), -result.mean_snr, result.name))


def measure(name: str, q: cg.QuantizedTensor, x: Tensor) -> Result:
    plane = q.plane(cg.ROWWISE)
    assert plane is not None
    errors = (relative_error(q, x, direction) for direction in (cg.ROWWISE, cg.COLUMNWISE))
    return Result(name, plane.format.bits_per_element, *errors)


def relative_error(q: cg.QuantizedTensor, x: Tensor, direction: cg.Direction) -> float:
    exact = x.double()
    decoded = q.dequantize(dtype=torch.float32, direction=direction).double()
    return float((decoded - exact).norm() / exact.norm())


def print_table(results: Sequence[Result], size: int) -> None:
    table = Table(
        title=f"What a {size} x {size} matrix with outlier columns loses, by format and direction",
        caption="Error: Frobenius norm of the difference over that of the matrix.\n"
        "Formats are used with their default options.",
    )
    table.add_column("format", no_wrap=True)
    table.add_column("bits per\nelement", justify="right")
    for direction in ("rowwise", "columnwise"):
        table.add_column(f"{direction}\nerror", justify="right", style="dim")
        table.add_column(f"{direction}\nSNR dB", justify="right")
    for _, same_cost in groupby(results, key=lambda result: result.cost):
        for result in same_cost:
            table.add_row(
                f"[{result.colour}]{result.name}[/]",
                result.cost,
                *(cell for error in (result.rowwise_error, result.columnwise_error) for cell in cells(error)),
            )
        table.add_section()
    Console().print(table)


def cells(error: float) -> tuple[str, str]:
    return (f"{error:.5f}", f"{snr(error):.2f}") if error else ("0", "exact")


def draw(results: Sequence[Result], path: Path) -> None:
    """SNR against stored bits: a band for each cost, in it a line for each format from best to worst.

    Many formats cost exactly the same, so points at their true abscissa would lie on top of each other.
    """
    bands = [(cost, list(band)) for cost, band in groupby(results, key=lambda result: result.cost)]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.29 * (len(results) + BAND_GAP * len(bands))), layout="constrained")
    y = 0.0
    for index, (cost, band) in enumerate(bands):
        height = len(band) + BAND_GAP
        axes.axhspan(y, y + height, color=("#f3f3f0", "white")[index % 2], linewidth=0, zorder=0)
        axes.text(-0.015, y + height / 2, cost, transform=axes.get_yaxis_transform(), ha="right", va="center")
        for line, result in enumerate(reversed(band)):
            draw_line(axes, y + (BAND_GAP + 1) / 2 + line, result)
        y += height
    dress(axes, results, height=y)
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.2)
    plt.close(figure)


BAND_GAP = 0.5  # empty height within a band, in lines


def draw_line(axes: Axes, y: float, result: Result) -> None:
    row, column, colour = result.rowwise_snr, result.columnwise_snr, result.colour
    text: dict[str, Any] = {"va": "center", "fontsize": 9, "color": colour}
    if math.isinf(row) and math.isinf(column):
        axes.text(0.99, y, f"{result.name}: no loss →", transform=axes.get_yaxis_transform(), ha="right", **text)
        return
    axes.plot([row, column], [y, y], color=colour, linewidth=2, alpha=0.35)
    axes.plot(row, y, **ROWWISE_MARK, color=colour)
    axes.plot(column, y, **COLUMNWISE_MARK, color=colour)
    axes.annotate(result.name, (max(row, column), y), (9, 0), textcoords="offset points", **text)


# The columnwise mark is smaller, light and drawn last: both are seen where the directions agree.
ROWWISE_MARK: dict[str, Any] = {"marker": "o", "markersize": 9, "markeredgewidth": 0, "linestyle": "none"}
COLUMNWISE_MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "markeredgewidth": 1.3,
    "markerfacecolor": "white",
    "linestyle": "none",
}


def dress(axes: Axes, results: Sequence[Result], height: float) -> None:
    """Axes, title and legend."""
    values = [value for result in results for value in (result.rowwise_snr, result.columnwise_snr)]
    low, high = min(values), max(filter(math.isfinite, values))
    axes.set_xlim(low - 0.05 * (high - low), high + 0.2 * (high - low))  # room for the last label
    axes.set_ylim(0, height)
    axes.xaxis.set_major_locator(MultipleLocator(5))
    axes.set_yticks([])
    axes.set_xlabel("signal-to-noise ratio, dB (right is better)")
    axes.grid(axis="x", color="#d9d9d9", linewidth=0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("What a format keeps of a matrix with outlier columns\n", loc="left", fontweight="bold", pad=10)
    axes.text(
        -0.015, 1.01, "stored bits\nper element", transform=axes.transAxes, ha="right", fontsize=8, color="#555555"
    )
    row = Line2D([], [], **ROWWISE_MARK, color="#555555")
    column = Line2D([], [], **COLUMNWISE_MARK, color="#555555")
    axes.legend(
        [row, column, (row, column)],
        ["rowwise", "columnwise", "both alike"],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        borderpad=0,
        handletextpad=0.2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for the picture")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the matrix, a multiple of 128")
    arguments = parser.parse_args()

    torch.manual_seed(0)  # stochastic rounding draws its seed from torch
    results = measure_all(activations(arguments.size))
    print_table(results, arguments.size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    picture = arguments.out / "formats.png"
    draw(results, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
