"""What has passed is left out until anything that it depends on changes."""

import shutil

import pytest

from .passed import ROOT, SOURCES, TESTS, Passed, state

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


@pytest.fixture
def copied(tmp_path):
    for folder in (*SOURCES, *TESTS):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("file", [
    "src/crossgrain/kernels/triton/device/decode.py", "src/crossgrain/kernels/reference/scaling.py",
    "src/crossgrain/formats/mxint8.py", "tests/gpu/ptx/wave.py", "tests/gpu/kernels/cases.py",
    "tests/gpu/kernels/test_emulated.py", "tests/gpu/gates/test_gates.py",
])  # fmt: skip
def test_code_changes_the_state_and_words_do_not(copied, file):
    before, path = state(copied), copied / file
    assert before == state(ROOT)
    path.write_text("# A comment.\n" + path.read_text())
    assert state(copied) == before
    path.write_text(path.read_text() + "\nCHANGED = 1\n")
    assert state(copied) != before
