"""What has passed is left out until anything that it depends on changes."""

import shutil
from types import SimpleNamespace

import pytest

from .conftest import _Resuming
from .passed import FILES, ROOT, SOURCES, TESTS, Passed, name_of, state

NAME = "tests/gpu/kernels/test_emulated.py::test_writing[sm_90 mxfp8]"


def test_what_passed_is_known_in_the_next_run(tmp_path):
    passed = Passed(tmp_path, "3.7.1", "a")
    assert NAME not in passed
    passed.add(NAME)
    passed.add("tests/gpu/launch/test_launch.py::test_a_launch")
    again = Passed(tmp_path, "3.7.1", "a")
    assert NAME in again and "tests/gpu/launch/test_launch.py::test_a_launch" not in again


def test_another_state_or_triton_begins_anew(tmp_path):
    Passed(tmp_path, "3.7.1", "a").add(NAME)
    assert NAME not in Passed(tmp_path, "3.9.0", "a")
    assert NAME not in Passed(tmp_path, "3.7.1", "b")
    assert NAME not in Passed(tmp_path, "3.7.1", "a")  # for the file was begun anew


def test_a_run_that_began_before_a_change_records_nothing_for_the_state_after_it(tmp_path):
    before = Passed(tmp_path, "3.7.1", "a")
    Passed(tmp_path, "3.7.1", "b")
    before.add(NAME)
    assert NAME not in Passed(tmp_path, "3.7.1", "b")


def test_a_name_that_was_not_written_to_its_end_has_not_passed(tmp_path):
    passed = Passed(tmp_path, "3.7.1", "a")
    passed.add(NAME + "_and_more")
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().removesuffix("_and_more\n"))
    assert NAME not in Passed(tmp_path, "3.7.1", "a")


def test_names_are_without_groups_of_workers():
    for name in ("f.py::test_a", "f.py::test_a[b]", "f.py::test_a[b@c [1, 2]]"):
        assert name_of(name) == name_of(name + "@group") == name


@pytest.mark.parametrize("outcomes, passes", [
    (("passed", "passed", "passed"), True), (("passed", "passed", "failed"), False),
    (("passed", "failed", "passed"), False), (("passed", "skipped", "passed"), False), (("skipped", "passed"), False),
])  # fmt: skip
def test_a_test_has_passed_when_its_fixtures_have_ended(tmp_path, outcomes, passes):
    passed = Passed(tmp_path, "3.7.1", "a")
    resuming = _Resuming(passed, SimpleNamespace())
    phases = ("setup", "call", "teardown") if len(outcomes) == 3 else ("setup", "teardown")
    for when, outcome in zip(phases, outcomes, strict=True):
        assert NAME not in passed
        resuming.pytest_runtest_logreport(pytest.TestReport(NAME, ("", 0, ""), {}, outcome, None, when))
    assert (NAME in passed) == passes


@pytest.fixture
def copied(tmp_path):
    for folder in (*SOURCES, *TESTS):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (file for pattern in FILES for file in ROOT.glob(pattern)):
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    return tmp_path


@pytest.mark.parametrize("file", [
    "src/crossgrain/kernels/triton/device/decode.py", "src/crossgrain/kernels/reference/scaling.py",
    "src/crossgrain/formats/mxint8.py", "tests/gpu/ptx/wave.py", "tests/gpu/kernels/cases.py",
    "tests/gpu/kernels/test_emulated.py", "tests/gpu/gates/test_gates.py", "src/crossgrain/planes/plane.py",
    "src/crossgrain/kernels/target.py", "tests/common/encodings.py",
])  # fmt: skip
def test_code_changes_the_state_and_words_do_not(copied, file):
    before, path = state(copied), copied / file
    assert before == state(ROOT)
    path.write_text("# A comment.\n" + path.read_text())
    assert state(copied) == before
    path.write_text(path.read_text() + "\nCHANGED = 1\n")
    assert state(copied) != before
