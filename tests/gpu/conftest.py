"""The option ``--resume``: leave out emulated tests that have passed already, and record those that pass now."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from .passed import Passed, name_of, state


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, metavar="FOLDER", help="where emulated tests that passed are recorded")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--resume", None)  # if the whole suite runs, this file is read after the command line
    if folder is not None:
        config.pluginmanager.register(_Resuming(Passed(folder, version("triton"), state()), config))


class _Resuming:
    def __init__(self, passed: Passed, config: pytest.Config) -> None:
        self._passed = passed
        self._is_worker = hasattr(config, "workerinput")  # of pytest-xdist: who has started it hears of all results
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if name_of(item.nodeid) in self._passed]
        if known:
            config.hook.pytest_deselected(items=known)
            items[:] = [item for item in items if name_of(item.nodeid) not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed at its end: fixtures have something to assert as well."""
        name = name_of(report.nodeid)
        if not report.passed:  # or skipped
            self._failed.add(name)
        elif report.when == "teardown" and name not in self._failed and not self._is_worker:
            self._passed.add(name)
