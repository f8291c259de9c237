"""What crossgrain tells: by logging, once, on stderr if nobody has configured anything, and also while it is traced."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import crossgrain as cg
from crossgrain.runtime import logs

from ..common.logs import logged, silent, warned

NAME = "crossgrain.recipe.place"


def texts(records):
    return [record.getMessage() for record in records]


def test_a_text_is_told_once_by_the_logger_of_its_module():
    with logged() as records:
        for _ in range(3):
            logs.warn(NAME, "fc1: something")
        logs.warn(NAME, "fc2: something")
        logs.warn("crossgrain.nn", "fc1: something")
    assert texts(records) == ["crossgrain: fc1: something", "crossgrain: fc2: something", "crossgrain: fc1: something"]
    assert [record.name for record in records] == [NAME, NAME, "crossgrain.nn"]
    assert {record.levelname for record in records} == {"WARNING"}


def test_another_text_about_the_same_subject_is_not_told():
    with logged() as records:
        for share in (90, 91, 92):
            logs.warn(NAME, f"lost {share} %", subject="weight")
    assert texts(records) == ["crossgrain: lost 90 %"]


def test_callers_that_keep_count_themselves_are_always_told():
    with logged() as records:
        for _ in range(2):
            logs.warn(NAME, "again", once=False)
    assert len(records) == 2


def test_the_record_has_the_line_of_the_caller():
    weight = torch.nn.Parameter(cg.quantize(torch.randn(32, 32), "mxfp8"))
    with warned("an in-place update left") as records, torch.no_grad():
        weight.add_(1e-7)
    assert records[0].pathname == __file__


def test_the_memory_is_bounded_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(logs, "MOST_REMEMBERED", 3)
    with logged() as records:
        for number in (0, 1, 2, 0, 3, 0, 3):
            logs.warn(NAME, f"number {number}")
    assert [text[-1] for text in texts(records)] == ["0", "1", "2", "3", "0"]
    assert len(logs._told) == 3


def test_what_nobody_listens_to_is_not_remembered(caplog):
    with caplog.at_level(logging.ERROR, "crossgrain"):
        logs.warn(NAME, "later")
    with warned("later"):
        logs.warn(NAME, "later")


def test_a_handler_may_raise_each_time():
    class Raising(logging.Handler):
        def emit(self, record):
            raise RuntimeError(record.getMessage())

    handler = Raising()
    logging.getLogger("crossgrain").addHandler(handler)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crossgrain: not this"):
                logs.warn(NAME, "not this")
    finally:
        logging.getLogger("crossgrain").removeHandler(handler)


def test_what_is_withheld_is_a_list_and_is_told_later():
    with silent(), logs.withheld() as kept:
        for _ in range(2):
            logs.warn(NAME, "aside")
        logs.inform(NAME, "not a warning")
    assert kept == ["aside", "aside"]
    with warned("aside"):
        logs.warn(NAME, "aside")


def test_information_is_hidden_until_it_is_asked_for(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    cg.convert(model, "mxfp8")
    assert not caplog.records
    with caplog.at_level(logging.INFO, "crossgrain"):
        report = cg.convert(model, "mxfp8")
    assert [record.getMessage() for record in caplog.records] == [f"crossgrain: {report}"]
    assert caplog.records[0].name == "crossgrain.convert.model"


SETUPS = {
    "not configured": ("", "crossgrain: fc1: beware\n"),
    "all off": ("logging.getLogger('crossgrain').setLevel('ERROR')", ""),
    "a room off": ("logging.getLogger('crossgrain.recipe').setLevel('ERROR')", ""),
    "another room off": ("logging.getLogger('crossgrain.nn').setLevel('ERROR')", "crossgrain: fc1: beware\n"),
    "configured": (
        "logging.basicConfig(level='INFO')",
        "WARNING:crossgrain.recipe.place:crossgrain: fc1: beware\n"
        "INFO:crossgrain.recipe.place:crossgrain: by the way\n",
    ),
}
# The first process imports everything, and each setup has a child of it, in which nothing was logged yet.
PROGRAM = """
import logging, os, sys
import crossgrain as cg
from crossgrain.runtime.logs import inform, warn

for file, setup in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    if os.fork() == 0:
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
        exec(setup)
        for _ in range(2):
            warn("crossgrain.recipe.place", "fc1: beware")
        inform("crossgrain.recipe.place", "by the way")
        os._exit(0)
    assert os.wait()[1] == 0, setup
"""


@pytest.fixture(scope="module")
def told_on_stderr(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stderr")
    arguments = [text for name, (setup, _) in SETUPS.items() for text in (str(folder / name), setup)]
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True)
    return {name: (folder / name).read_text() for name in SETUPS}


@pytest.mark.parametrize("name", SETUPS)
def test_stderr(name, told_on_stderr):
    assert told_on_stderr[name] == SETUPS[name][1]


def test_traced_code_can_warn_without_breaking_its_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def twice(x: torch.Tensor) -> torch.Tensor:
        logs.warn(NAME, f"{x.shape[0]} rows")
        logs.inform(NAME, "traced")
        return x * 2

    x = torch.randn(3)
    with warned("crossgrain: 3 rows") as records:
        assert torch.equal(twice(x), x * 2)
        assert torch.equal(twice(x), x * 2)
    assert len(records) == 1 and records[0].pathname == __file__


@pytest.mark.parametrize("module", ["crossgrain", "crossgrain.nn.linear", "crossgrain_command.app"])
def test_a_warning_that_our_code_causes_fails_a_test(module):
    """By the filter in pyproject.toml."""
    with pytest.raises(UserWarning, match="from torch"):
        warnings.warn_explicit("from torch", UserWarning, "linear.py", 1, module)


def test_python_warnings_are_for_deprecated_names_and_what_transformer_engine_warns_of():
    """All else is logged: a page says so."""
    source = Path(cg.__file__).parent
    found = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if "warnings.warn(" in path.read_text()
    }
    assert found == {
        "compat/adapters/contexts.py",  # deprecated names
        "nn/linear_module.py",  # "Ignoring save_original_input=True"
        "offload/layers.py",  # a deprecated argument
        "recipe/compatibility.py",  # "Recipe type changed"
        "recipe/context.py",  # deprecated names
    }


FORKED = """
import os, signal, threading
from crossgrain.runtime import logs
held, done = threading.Event(), threading.Event()
def hold():
    with logs._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)
    logs.warn("crossgrain.nn", "told in the child")
    os._exit(0)
done.set()
thread.join()
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_process_that_forks_while_a_thread_warns():
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert ended.returncode == 0 and "crossgrain: told in the child" in ended.stderr, ended.stderr


def test_a_signal_may_warn_while_its_thread_does():
    with logs._lock, logged() as records:  # a thread that would wait for itself
        logs.warn(NAME, "from a handler")
    assert texts(records) == ["crossgrain: from a handler"]
