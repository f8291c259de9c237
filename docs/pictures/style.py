"""How all pictures look: on nothing, in a grey and in colours that a light and a dark page show alike."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no display

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "images"
GREY = "#80868f"
BLUE, RED, GREEN, PURPLE, AMBER = "#4c83d0", "#d9593f", "#3f9b57", "#9a6cc4", "#c58a1c"
FAMILIES = {"fp8": BLUE, "mx": RED, "nvfp4": GREEN, "hifloat8": PURPLE}

plt.rcParams.update(
    {
        "svg.hashsalt": "crossgrain",  # the same picture is the same file
        "font.size": 11,
        "text.color": GREY,
        "axes.edgecolor": GREY,
        "axes.labelcolor": GREY,
        "axes.titlecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GREY,
        "grid.alpha": 0.25,
    }
)


def colour_of(name: str) -> str:
    """The colour of a format's family."""
    return next((colour for family, colour in FAMILIES.items() if name.startswith(family)), GREY)


def save(figure: Figure, name: str, directory: Path | None = None) -> Path:
    """Write ``name.svg``, by default where pages find it."""
    path = (directory or IMAGES) / f"{name}.svg"
    figure.savefig(path, transparent=True, bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    plt.close(figure)
    return path
