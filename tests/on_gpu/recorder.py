"""A plugin of pytest: write down what each test does, as soon as it does it.

    pytest -p tests.on_gpu.recorder --record FILE --minutes 10 tests/on_gpu

FILE gets a line of JSON for every test that starts and for every test that ends, so that it also tells which test was
running when the process died.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FINDING = "finding"
"""The property of a test under which it records what it has found."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.addoption("--record", type=Path, help="append a line of JSON for each test to this file")
    parser.addoption("--minutes", type=float, default=10.0, help="about how long all checks may take")


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "outcome": "started"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            found = dict(report.user_properties).get(FINDING, {"numbers": {}, "problems": []})
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self._write({**line, "reason": reason_of(report), **found})

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def reason_of(report: Any) -> str:
    """Why a test was skipped, or the last line of its error; "" if it has passed."""
    if report.outcome == "passed" or report.longrepr is None:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:2000]


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record, in the process that hands out the tests."""
    file = config.getoption("record")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(file), "gpu_recorder")
