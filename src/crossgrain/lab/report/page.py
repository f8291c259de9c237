"""Write a report: HTML, style, program and data in one file."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from ...files.durable import whole_file
from ..sensitivity import Sensitivity
from ..verify import Verification
from .data import report_data
from .distributions import Distribution
from .static import headline, introduction, remarks, sentences, static_tables

PROGRAM = ("core.js", "chart.js", "map.js", "details.js", "budget.js", "verified.js", "main.js")  # in this order


def write_report(
    path: str | os.PathLike[str],
    sensitivity: Sensitivity,
    *,
    frontier: Sequence[Any] | None = None,
    found: Any | None = None,
    verification: Verification | None = None,
    distributions: Iterable[Distribution | Mapping[str, Any]] | None = None,
    title: str = "Where fewer bits are enough",
) -> None:
    """Write one HTML file that shows what was measured, searched and verified. It loads nothing from anywhere.

    Args:
        path: the file, which is whole or not there.
        sensitivity: what each format costs at each site.
        frontier: recipes that save more and more, for the slider: each with ``saving`` (from 0 to 1), ``predicted`` (an
            `Estimate`, or mean, low and high), ``recipe`` and ``chosen`` (a candidate by site), as attributes or in a
            mapping. Without it, there is no slider.
        found: the recipe that was chosen: one more of these, at which the slider begins.
        verification: paired runs of recipes. Those that are on the frontier are drawn there, too.
        distributions: how tensors are distributed, for the details of a site.
        title: title of the page.

    Raises:
        ValueError: a recipe or a distribution is about layers or candidates that were not measured.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> s = cg.lab.sensitivity(model, batches, loss_fn, candidates=["nvfp4"])
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cg.lab.write_report(f"{root}/report.html", s, frontier=cg.lab.frontier(s, points=3, scale=128))
    """
    data = report_data(sensitivity, frontier, found, verification, distributions, title)
    page = Template(_asset("template.html")).substitute(
        title=html.escape(title),
        style=_asset("report.css"),
        headline=headline(data),
        introduction=introduction(data),
        remarks=remarks(data),
        tables=static_tables(data),
        may=sentences(data["may"]),
        may_not=sentences(data["may_not"]),
        data=_inside_script(data),
        program="\n".join(_asset(name) for name in PROGRAM),
    )
    with whole_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _inside_script(data: Any) -> str:
    """JSON in which nothing can end or open an element: `<` is written as an escape, which JSON reads as the same."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
