"""A verification as a table of text."""

from __future__ import annotations

import math

from ..intervals import with_spread
from ..tables import aligned
from .claims import claims
from .paired import DIVERGED, Paired
from .result import Row, Verification


def shown(result: Verification) -> str:
    """The table, and below it what may and may not be claimed."""
    seeds = len(result.seeds)
    title = (
        f"{result.steps} steps, {seeds} seed{'s' * (seeds != 1)}; gap to {result.baseline} over the last {result.last} "
        "steps, with 95 % intervals over seeds" + (", stopped early" if result.interrupted else "")
    )
    cells = [["recipe", "loss", "gap", "growth in 100 steps", "verdict"], *(_cells(row) for row in result.rows())]
    may, may_not = claims(result)
    parts = [title, *aligned(cells), "", *may, "", "Not shown by these runs:", *(f"- {line}" for line in may_not)]
    return "\n".join(parts)


def growth_text(found: Paired) -> str:
    """The growth in 100 steps, with its interval, and a mark if it is flagged."""
    if found.growth is None:
        return ""
    mean, half = 100 * found.growth.mean, 100 * found.growth.half_width
    return with_spread(mean, half, "+") + (" GROWS" if found.grows else "")


def verdict_text(row_verdict: str | None, found: Paired | None) -> str:
    """The verdict, or without a tolerance whether the gap differs from 0."""
    if row_verdict is not None or found is None:
        return row_verdict or ""
    if found.gap.count < 2:
        return "one seed"
    if not found.significant:
        return "not resolved from 0"
    return "above 0" if found.gap.mean > 0 else "below 0"


def _cells(row: Row) -> list[str]:
    loss = "" if math.isnan(row.loss) else f"{row.loss:.4f}"
    if row.verdict == DIVERGED:
        places = ", ".join(f"step {step} of seed {seed}" for seed, step in row.diverged.items())
        return [row.label, "", "", "", f"{DIVERGED}: {places}"]
    if row.paired is None:
        return [row.label, loss, "", "", ""]
    return [
        row.label,
        loss,
        str(row.paired.gap),
        growth_text(row.paired),
        verdict_text(row.verdict, row.paired),
    ]
