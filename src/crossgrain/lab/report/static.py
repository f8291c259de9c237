"""The parts of a report that are there without JavaScript: an introduction, and tables of all numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..intervals import with_spread
from .data import QUANTITIES

UNITS = {
    "loss": "loss, nats per token",
    "noise": "noise, share of a batch's",
    "bias": "bias², share of a batch's noise",
}


def headline(data: Mapping[str, Any]) -> str:
    """The recipe that was chosen, in one sentence of HTML; nothing if none was."""
    if "found" not in data:
        return ""
    point, rows = data["points"][data["found"]], data.get("verified", {}).get("rows", ())
    text = (
        f"The recipe that the search chose saves {100 * point['saving']:.3g} %, with a predicted gap of "
        f"{_interval(point['predicted'])} nats per token. "
    )
    row = next((row for row in rows if row.get("point") == data["found"] and "gap" in row), None)
    if row is None:
        text += "No paired runs have verified it."
    else:
        text += f"Paired runs: {_interval(row['gap'])}, {row['verdict']}."
    return f'<p class="headline">{escape(text)}</p>'


def introduction(data: Mapping[str, Any]) -> str:
    """What was measured, in two sentences of HTML."""
    layers, sites = len(data["layers"]), sum(1 for _ in _sites(data))
    candidates = " · ".join(candidate["label"] for candidate in data["candidates"])
    loss = f" at a loss of {data['loss']:.4g} nats per token" if "loss" in data else ""
    text = (
        f"{sites} GEMMs of {_count(layers, 'layer')}, measured against high precision on "
        f"{_count(data['batches'], 'batch', 'es')}{loss}. Formats: {candidates}. "
        f"What is not moved stays in {data['base']}."
    )
    if data["interrupted"]:
        text += " The measurement was stopped early: what is missing is empty."
    return escape(text)


def static_tables(data: Mapping[str, Any]) -> str:
    """All effects, the frontier and the verified recipes as HTML tables, for browsers without JavaScript."""
    parts = [_effects(data, number) for number in range(len(data["candidates"]))]
    if data["points"]:
        parts.append(_frontier(data))
    if "verified" in data:
        parts.append(_verified(data["verified"]))
    return "\n".join(parts)


def sentences(lines: Iterable[str]) -> str:
    """A list of sentences as HTML."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def remarks(data: Mapping[str, Any]) -> str:
    """What was left out, and what else has to be known, as HTML; nothing if there is nothing."""
    left = [f"{layer}: {reason}" for layer, reason in data["left_out"].items()]
    parts = [sentences(data["notes"])] if data["notes"] else []
    if left:
        parts.append(f"<details><summary>{_count(len(left), 'layer')} of which something was left out</summary>")
        parts.append(f"{sentences(left)}</details>")
    return "".join(parts)


def _sites(data: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    for number in range(len(data["layers"])):
        for gemm in data["gemms"]:
            if any(effects[f"{gemm}.{QUANTITIES[gemm][0]}"][number] is not None for effects in data["effects"]):
                yield number, gemm


def _effects(data: Mapping[str, Any], number: int) -> str:
    columns = [(gemm, quantity) for gemm in data["gemms"] for quantity in QUANTITIES[gemm]]
    rows = [
        [layer[0], *(_interval(data["effects"][number][f"{gemm}.{quantity}"][at]) for gemm, quantity in columns)]
        for at, layer in enumerate(data["layers"])
    ]
    return _table(
        f"What {data['candidates'][number]['label']} costs at each site",
        ["layer", *(f"{gemm}: {UNITS[quantity]}" for gemm, quantity in columns)],
        rows,
    )


def _frontier(data: Mapping[str, Any]) -> str:
    rows = [[f"{100 * point['saving']:.1f} %", _interval(point["predicted"])] for point in data["points"]]
    return _table("Frontier", ["saving", "predicted gap, nats per token"], rows)


def _verified(verified: Mapping[str, Any]) -> str:
    rows = [
        [
            row["label"],
            _number(row.get("loss")),
            _interval(row.get("gap")),
            row.get("growth", ""),
            row.get("verdict", ""),
        ]
        for row in verified["rows"]
    ]
    return _table("Paired runs", ["recipe", "loss", "gap", "growth in 100 steps", "verdict"], rows)


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _interval(values: Sequence[float | None] | None) -> str:
    if values is None or values[0] is None:
        return ""
    mean, (low, high) = values[0], values[1:]
    return with_spread(mean, math.inf if low is None or high is None else (high - low) / 2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}{plural * (number != 1)}"
