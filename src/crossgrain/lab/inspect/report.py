"""`Inspection`: what an Inspector has seen, from memory or from a file, and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bad_step import BadStep, first_bad_step
from .looking import Record

VERSION = 1  # of the files
_GEMMS = ("fprop", "dgrad", "wgrad", None)
_SHORT = {"input": "x", "weight": "W", "grad_output": "dy"}
_WIDTH = 80


@dataclass
class Inspection:
    """What was seen in a run.

    Attributes:
        header: what was looked at, and which layers were not seen in the first look.
        records: one record for each plane and look, in the order in which planes were made. docs/how-to/inspect.md
            explains their fields.
        looks: a summary of each look.
        end: what was known at the end; None if the run is not finished, or was killed.
        bad_step: the first bad step, if it is known already.
        runs: number of runs in the file.
        cut: the file ends within a line: the program was killed while it wrote.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with cg.lab.Inspector(model, every=1) as inspector:
        ...     model(torch.randn(32, 32)).sum().backward()
        ...     inspector.step()
        >>> inspection = inspector.report()
        >>> inspection.bad_step is None, len(inspection.looks)
        (True, 1)
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    looks: list[Mapping[str, Any]] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    bad_step: BadStep | None = None
    runs: int = 1
    cut: bool = False

    def first_bad_step(self) -> BadStep | None:
        """The first step with NaNs, unusual saturation or an unusual error, and where; None if there is none."""
        return self.bad_step or first_bad_step(self.records)

    @property
    def steps(self) -> list[int]:
        """The steps of the looks."""
        return [look["step"] for look in self.looks]

    def not_seen(self) -> dict[str, str]:
        """Layers that were not seen, or not all of their tensors, and why."""
        latest = self.end or (self.looks[-1] if self.looks else self.header)
        return dict(latest.get("not_seen", {}))

    def not_quantized(self) -> dict[str, str]:
        """Layers that are not quantized modules, and their types."""
        return dict(self.header.get("not_quantized", {}))

    def at(self, step: int | None = None) -> list[Record]:
        """The records of one look; by default of the last.

        Raises:
            ValueError: there was no look at this step.
        """
        if not self.looks:
            return []
        step = self.steps[-1] if step is None else step
        if step not in self.steps:
            raise ValueError(f"there was no look at step {step}; there was one at {_listed(self.steps)}")
        return [record for record in self.records if record["step"] == step]

    def to_dict(self, step: int | None = None) -> dict[str, Any]:
        """One look as plain data, with the first bad step."""
        bad = self.first_bad_step()
        return {
            "header": dict(self.header),
            "steps": self.steps,
            "records": self.at(step),
            "first_bad_step": None if bad is None else bad.to_dict(),
            "not_seen": self.not_seen(),
            "not_quantized": self.not_quantized(),
            "finished": self.end is not None,
        }

    def text(self, step: int | None = None, top: int | None = 8) -> str:
        """One look as a table of 80 columns: for each GEMM the planes with the largest errors.

        Args:
            step: the step of the look; None for the last.
            top: the number of planes for each GEMM; None for all.
        """
        records = self.at(step)
        lines = []
        if records:
            lines += _table(records, records[0]["step"], top)
        else:
            lines.append("nothing was seen")
        bad = self.first_bad_step()
        lines += _wrapped("first bad step: " + ("none" if bad is None else str(bad)))
        lines += _named("not seen", self.not_seen())
        lines += _named("not quantized", self.not_quantized())
        if self.cut:
            lines.append("The file ends within a line: the program was killed while it wrote.")
        if self.runs > 1:
            lines.append(f"The file has {self.runs} runs; this is the last.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def read_inspection(path: str | os.PathLike[str]) -> Inspection:
    """Read a file that an Inspector has written, also while it is still being written. Of several runs, the last.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> _ = cg.convert(model, "mxfp8")
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with cg.lab.Inspector(model, f"{root}/stats.jsonl", every=1) as inspector:
        ...         model(torch.randn(32, 32)).sum().backward()
        ...         inspector.step()
        ...     len(cg.lab.read_inspection(f"{root}/stats.jsonl").looks)
        1
    """
    found, runs, cut = Inspection(), 0, False
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # without a newline at the end
                cut = True
                break
            raise _not_ours(path, number, "is not JSON") from error
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "header":
            if content.get("file_version") != VERSION:
                raise _not_ours(path, number, f"has version {content.get('file_version')}, not {VERSION}")
            found, runs = Inspection(header=content), runs + 1
        elif kind == "plane" and runs:
            found.records.append(content)
        elif kind == "look" and runs:
            found.looks.append(content)
        elif kind == "end" and runs:
            found.end = content
        else:
            raise _not_ours(
                path, number, "is not a header, and none came before" if not runs else "is of no known kind"
            )
    if not runs:
        raise ValueError(f"{path}: it has no header, so it is not a file of crossgrain.lab.Inspector, or is empty")
    found.runs, found.cut = runs, cut
    return found


def _not_ours(path: str | os.PathLike[str], line: int, problem: str) -> ValueError:
    return ValueError(f"{path}: line {line} {problem}; it is not a file of crossgrain.lab.Inspector")


# ---- text ------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record], step: int, top: int | None) -> list[str]:
    in_use = [record for record in records if record["what_if"] is None]
    others = list(dict.fromkeys(record["what_if"] for record in records if record["what_if"] is not None))
    letters = {label: chr(ord("A") + at % 26) for at, label in enumerate(others)}
    snr = {(*_place(record), record["what_if"]): record["snr_db"] for record in records}
    wide = _WIDTH - 49 - 6 * len(others)
    lines = [f"step {step}: planes with the largest errors, by GEMM", _header(wide, letters.values())]
    for gemm in _GEMMS:
        rows = [record for record in in_use if record["gemm"] == gemm]
        rows.sort(key=lambda record: -(record["relative_error"] or 0.0))
        shown = rows if top is None else rows[:top]
        for record in shown:
            cells = [_decibels(snr.get((*_place(record), label))) for label in others]
            lines.append(_row(record, wide, cells))
        if len(rows) > len(shown):
            lines.append(f"      ... and {len(rows) - len(shown)} with smaller errors")
    lines += [f"{letter}: signal-to-noise ratio, if it were {label}" for label, letter in letters.items()]
    return lines


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("layer", "group", "tensor", "direction"))


def _header(wide: int, letters: Iterable[str]) -> str:
    names = "".join(f"{letter:>6}" for letter in letters)
    return f"{'GEMM':<6}{'layer':<{wide}} {'':<2} {'format':<14}{'SNR':>5}{'bias':>6}{'lost':>5}{'cut':>5}{names}   "


def _row(record: Mapping[str, Any], wide: int, others: Sequence[str]) -> str:
    layer = record["layer"] if record["group"] is None else f"{record['layer']}[{record['group']}]"
    tensor = _SHORT.get(record["tensor"], record["tensor"][:2])
    cells = "".join(f"{cell:>6}" for cell in others)
    bias = "" if record["bias"] is None else f"{record['bias']:.3f}"
    return (
        f"{record['gemm'] or '':<6}{_ending(layer, wide)} {tensor:<2} {_beginning(record['format'], 14)}"
        f"{_decibels(record['snr_db']):>5}{bias:>6}{_percent(record['underflow']):>5}{_percent(record['saturation']):>5}"
        f"{cells}{_marks(record)}"
    ).rstrip()


def _marks(record: Mapping[str, Any]) -> str:
    return " !" if record.get("nan") or record.get("inf") or record["nonfinite"] else ""


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float) -> str:
    percent = 100 * share
    return "0" if not share else f"{percent:.0f}%" if percent >= 10 else f"{percent:.1f}%" if percent >= 0.1 else "<.1%"


def _beginning(text: str, width: int) -> str:
    return f"{text if len(text) < width else text[: width - 2] + '…':<{width}}"


def _ending(text: str, width: int) -> str:
    return f"{text if len(text) <= width else '…' + text[1 - width :]:<{width}}"


def _named(title: str, layers: Mapping[str, str]) -> list[str]:
    """Layers by reason."""
    by_reason: dict[str, list[str]] = {}
    for layer, why in layers.items():
        by_reason.setdefault(why, []).append(layer)
    lines = []
    for why, names in by_reason.items():
        lines += _wrapped(f"{title}: {_listed(names)} ({why})")
    return lines


def _listed(items: Sequence[Any], most: int = 6) -> str:
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
