"""The report of all checks: one file to send back, and the same as text for people."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_INDENT = " " * 8
_ONLY_REPORTED = ("test_graphs.py", "test_bandwidth.py", "test_which_random_bits_the_stochastic_instruction_uses")


@dataclass
class Group:
    """The tests of one file, which ran in a process of their own.

    Attributes:
        file: name of the file.
        lines: what the recorder has written.
        ended: what is wrong with the way in which the process ended; "" if nothing is.
    """

    file: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""

    def checks(self) -> Iterator[dict[str, Any]]:
        """The outcome of each test. One that was started and never ended has failed."""
        ended = {line["test"]: line for line in self.lines if line["outcome"] != "started"}
        for line in self.lines:
            if line["outcome"] == "started" and line["test"] not in ended:
                yield {**line, "outcome": "failed", "reason": self.ended or "the process ended", **_NOTHING}
        yield from ended.values()
        if self.ended and not self.lines:
            yield {"test": self.file, "outcome": "failed", "seconds": 0.0, "reason": self.ended, **_NOTHING}


_NOTHING: dict[str, Any] = {"numbers": {}, "problems": []}


def report_of(machine: dict[str, Any], groups: Iterable[Group]) -> dict[str, Any]:
    """The whole report as plain data.

    Args:
        machine: what ``crossgrain doctor`` says about this machine.
        groups: what the tests have told.
    """
    checks = [{**check, "test": _short(check["test"])} for group in groups for check in group.checks()]
    for check in checks:
        check["only_reported"] = any(name in check["test"] for name in _ONLY_REPORTED)
    return without_places(
        {
            "report": "crossgrain on a GPU",
            "commit": commit(),
            "outcomes": dict(Counter(check["outcome"] for check in checks)),
            "machine": machine,
            "checks": checks,
        }
    )


def as_text(report: dict[str, Any]) -> str:
    """The report for people, 80 columns wide."""
    machine = report["machine"]
    gpus = [f"{gpu['device']}: {gpu['name']}, {gpu['generation']}" for gpu in machine.get("gpus", ())]
    versions = ", ".join(f"{each['name']} {each['version']}" for each in machine.get("packages", ()))
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report["outcomes"].items()))
    lines = [
        *_wrapped(f"crossgrain on a GPU, commit {report['commit'] or 'unknown'}"),
        *_wrapped("; ".join(gpus) or f"no GPU: {machine.get('no_gpu')}"),
        *_wrapped(versions),
        *_wrapped(
            f"CUDA {machine.get('cuda') or machine.get('hip')}, driver {machine.get('driver')}, {machine.get('system')}"
        ),
        outcomes or "no check was run",
        "",
    ]
    said = ""
    for check in report["checks"]:
        lines += _wrapped(f"{check['outcome']:8}{_words(check)}", _INDENT)
        reasons = check["problems"] or [check["reason"]]
        if [said] != reasons:  # tests that are skipped for the same reason follow each other
            lines += [line for reason in reasons for line in _wrapped(reason, _INDENT, first=_INDENT)]
        said = reasons[-1]
        if check["only_reported"]:
            lines += _wrapped(_flat(check["numbers"]), _INDENT, first=_INDENT)
    return "\n".join(lines) + "\n"


def write_report(report: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write ``gpu-report.json`` and ``gpu-report.txt``."""
    directory.mkdir(parents=True, exist_ok=True)
    data, text = directory / "gpu-report.json", directory / "gpu-report.txt"
    data.write_text(json.dumps(report, indent=1) + "\n")
    text.write_text(as_text(report))
    return data, text


def commit() -> str | None:
    """The commit of this clone, with "+" if files were changed; None if it is not a clone."""
    try:
        name = _git("rev-parse", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def without_places(data: Any) -> Any:
    """The same data without the names of directories of this machine, which concern nobody else."""
    if isinstance(data, str):
        return data.replace(str(_ROOT), ".").replace(str(Path.home()) + "/", "~/")
    if isinstance(data, dict):
        return {key: without_places(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_places(value) for value in data]
    return data


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _short(test: str) -> str:
    return test.removeprefix("tests/on_gpu/")


def _words(check: dict[str, Any]) -> str:
    """The name of a test in words."""
    _, _, name = check["test"].partition("::")
    name, bracket, parameter = (name or check["test"]).removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f" ({parameter[:-1]})" if bracket else "")


def _flat(numbers: dict[str, Any]) -> str:
    """Numbers by name in one line; tables are only in the file of data."""
    plain = {name: value for name, value in numbers.items() if isinstance(value, int | float | str)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain.items()
    )


def _wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
