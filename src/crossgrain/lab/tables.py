"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Rows as lines with columns of equal widths.

    Args:
        rows: the cells of each row, the same number in all.
        numbers: all columns but the first are numbers, which end at the same place.
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = map(str.rjust if numbers else str.ljust, rest, widths[1:])
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
