"""The report says what every check did, also if a process has died."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossgrain.cli.checkup import processor

from .. import __main__ as program
from ..finding import SHOWN, Deadline, Finding, attempted, check_each
from ..recorder import FINDING, _Recorder, reason_of
from ..report import Group, as_text, commit, report_of, without_places, write_report

_PASSED = {"test": "tests/on_gpu/test_waits.py::test_a", "outcome": "passed", "seconds": 1.0, "reason": ""}
_SKIPPED = {**_PASSED, "test": "tests/on_gpu/test_waits.py::test_b_c[mxfp8]", "outcome": "skipped", "reason": "no GPU"}
_NOTHING = {"numbers": {}, "problems": []}
_MACHINE = {"gpus": [{"device": "cuda:0", "name": "GPU", "generation": "10.0"}], "packages": [], "system": "Linux"}


def _started(line):
    return {"test": line["test"], "outcome": "started"}


def _report(*lines, ended=""):
    return report_of(_MACHINE, [Group("test_waits.py", list(lines), ended)])


def test_outcomes_are_counted():
    report = _report(_started(_PASSED), {**_PASSED, **_NOTHING}, _started(_SKIPPED), {**_SKIPPED, **_NOTHING})
    assert report["outcomes"] == {"passed": 1, "skipped": 1}
    assert [check["test"] for check in report["checks"]] == ["test_waits.py::test_a", "test_waits.py::test_b_c[mxfp8]"]
    text = as_text(report)
    assert "cuda:0: GPU, 10.0" in text and "1 passed, 1 skipped" in text
    assert "skipped b c (mxfp8)\n        no GPU\n" in text


def test_a_test_that_never_ended_has_failed():
    report = _report(
        _started(_PASSED), {**_PASSED, **_NOTHING}, _started(_SKIPPED), ended="the process was ended by SIGSEGV"
    )
    assert report["outcomes"] == {"passed": 1, "failed": 1}
    assert "failed  b c (mxfp8)\n        the process was ended by SIGSEGV\n" in as_text(report)


def test_a_process_that_ran_nothing_has_failed():
    report = _report(ended="no test was run")
    assert report["outcomes"] == {"failed": 1} and "test waits.py" not in as_text(report)
    assert "failed  waits.py\n        no test was run" in as_text(report)


def test_what_is_only_reported_is_told_with_its_numbers():
    line = {**_PASSED, "test": "tests/on_gpu/test_bandwidth.py::test_bandwidth[fp8]", "problems": []}
    report = _report({**line, "numbers": {"share_of_copy": 0.51234, "table": [1, 2]}})
    assert "share_of_copy 0.5123\n" in as_text(report) and report["checks"][0]["only_reported"]
    assert not _report({**_PASSED, **_NOTHING})["checks"][0]["only_reported"]


def test_problems_are_shown_in_80_columns(tmp_path):
    line = {**_PASSED, "outcome": "failed", "numbers": {}, "problems": ["wrong " * 50]}
    data, text = write_report(_report(line), tmp_path / "out")
    assert json.loads(data.read_text())["checks"][0]["problems"] == ["wrong " * 50]
    assert max(map(len, text.read_text().splitlines())) <= 80


def test_directories_of_the_machine_stay_here():
    root = str(Path(__file__).parents[3])
    given = {"a": [f"{root}/src/x.py:3", f"{Path.home()}/.cache"], "b": 1}
    expected = {"a": ["./src/x.py:3", "~/.cache"], "b": 1}
    assert without_places(given) == expected or Path.home() == Path(root)


def test_the_commit_is_told():
    assert commit() is None or len(commit().removesuffix("+")) == 40


def test_many_problems_are_counted():
    shown = Finding({}, ["x"] * (SHOWN + 5)).as_data()["problems"]
    assert len(shown) == SHOWN + 1 and shown[-1] == "and 5 more"


def test_checking_nothing_is_a_problem():
    assert check_each([("a", 1)], lambda item: None, Deadline(-1.0)) == Finding(
        {"checked": 0, "not_reached": 1, "wrong": 0}, ["nothing was checked"]
    )


def test_what_raises_is_a_problem():
    assert attempted(lambda: Finding(unknown=1)).problems[0].startswith("TypeError: ")
    found = check_each([("a", 0), ("b", 1)], lambda item: 1 // item, Deadline(1e6))
    assert found.problems == ["a: ZeroDivisionError: integer division or modulo by zero"]
    assert found.numbers == {"checked": 2, "not_reached": 0, "wrong": 1}


@pytest.fixture
def quick_machine(monkeypatch):
    monkeypatch.setattr(program, "described_machine", lambda: {**_MACHINE, "driver": None})
    monkeypatch.setattr(processor, "amx_problem", lambda: None)


def _stand_in(directory: Path, lines: str) -> str:
    """An executable in place of Python, which gets the arguments of pytest."""
    script = directory / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nrecord = sys.argv[sys.argv.index('--record') + 1]\n{lines}"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    "lines, ended",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process was ended by SIGSEGV"),
        ("sys.exit(4)", "pytest ended with 4"),
        ("sys.exit(1)", "no test was run"),
    ],
)
def test_a_process_that_dies_is_told(tmp_path, lines, ended):
    group = program.run_group("test_waits.py", 1.0, _stand_in(tmp_path, lines))
    assert group.ended == ended and [check["reason"] for check in group.checks()] == [ended]


def test_a_process_that_dies_in_a_test_keeps_what_was_done_before(tmp_path):
    wrote = json.dumps({**_PASSED, **_NOTHING}) + "\n" + json.dumps(_started(_SKIPPED)) + "\n"
    lines = f"open(record, 'w').write({wrote!r})\nos.kill(os.getpid(), signal.SIGABRT)"
    checks = list(program.run_group("test_waits.py", 1.0, _stand_in(tmp_path, lines)).checks())
    assert sorted(check["outcome"] for check in checks) == ["failed", "passed"]


def test_what_tests_do_is_recorded_at_once(tmp_path):
    record = tmp_path / "record"
    recorder = _Recorder(record)
    told = {"numbers": {"n": 1}, "problems": ["wrong"]}
    report = {"nodeid": "t", "duration": 1.0, "user_properties": [(FINDING, told)], "longrepr": None}
    recorder.pytest_runtest_logstart("t")
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        recorder.pytest_runtest_logreport(SimpleNamespace(**report, when=when, outcome=outcome))
    started, ended = map(json.loads, record.read_text().splitlines())
    assert started == {"test": "t", "outcome": "started"}
    assert ended == {"test": "t", "outcome": "failed", "seconds": 1.0, "reason": "", **told}


@pytest.mark.parametrize(
    "outcome, said, expected",
    [
        ("passed", None, ""),
        ("skipped", ("file.py", 3, "Skipped: no GPU"), "no GPU"),
        ("failed", SimpleNamespace(reprcrash=SimpleNamespace(message="AssertionError: 1")), "AssertionError: 1"),
        ("failed", "a text", "a text"),
    ],
)
def test_reasons(outcome, said, expected):
    assert reason_of(SimpleNamespace(outcome=outcome, longrepr=said)) == expected


@pytest.mark.long
@pytest.mark.usefixtures("quick_machine")
def test_without_a_gpu_every_test_is_skipped_and_the_report_says_why(tmp_path, capfd):
    """In a process of its own, as on a GPU."""
    assert program.main(["--out", str(tmp_path), "--files", "test_waits.py"]) == 0
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report["outcomes"] == {"skipped": 1}
    assert report["checks"][0]["reason"].startswith("no GPU: torch ")
    assert "The report is " in capfd.readouterr().out


@pytest.mark.usefixtures("quick_machine")
def test_a_failure_ends_with_1(tmp_path, monkeypatch):
    failed = Group("test_waits.py", [{**_PASSED, "outcome": "failed", **_NOTHING}])
    monkeypatch.setattr(program, "run_group", lambda file, minutes: failed)
    assert program.main(["--out", str(tmp_path), "--files", "test_waits.py"]) == 1


def test_a_driver_that_is_not_there(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "")
    assert program.driver_version() is None
