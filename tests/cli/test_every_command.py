"""Of every command: help and results fit 80 columns, JSON parses, pipes get no colours, and mistakes are told."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from crossgrain.cli.output import at_work, print_text
from crossgrain.kernels import warmup
from crossgrain.kernels.cpu import runtime
from crossgrain_command.app import COMMANDS, app

LISTED = [command for commands in COMMANDS.values() for command in commands]
NAMES = [command.name for command in LISTED]
TINY = ("--size", "tiny", "--steps", "2")
# Arguments of a run that takes seconds; what {out} and {run} are is in `place`. Export needs a model of transformers:
# tests/cli/test_export.py runs it.
ARGUMENTS = {
    "explain": ("--recipe", "nvfp4; head: hp", "--model", "tiny"),
    "formats": (),
    "compare": ("--recipes", "mxfp8", *TINY, "--seeds", "2", "--out", "{out}"),
    "train": ("--recipe", "mxfp8", *TINY),
    "sensitivity": ("--candidates", "mxfp4", *TINY, "--batches", "2", "--out", "{out}/sensitivity.json"),
    "search": ("--candidates", "mxfp4", *TINY, "--minutes", "0.1", "--out", "{out}"),
    "plan": ("--model", "llama3-70b", "--recipe", "mxfp8-fwd-nvfp4-bwd", "--gpus", "64", "--device", "b200"),
    "inspect": ("--recipe", "mxfp8", *TINY, "--out", "{out}/stats.jsonl"),
    "replay": ("{run}", "--runs", "8"),
    "doctor": (),
    "warmup": (),
}
WRONG = {
    "explain": ("--recipe", "nvfp44"),
    "formats": ("--colour",),
    "compare": ("--recipes", "nvfp44"),
    "train": ("--recipe", "nvfp44"),
    "sensitivity": ("--from", "nowhere:start"),
    "search": ("--from", "nowhere"),
    "plan": ("--model", "llama9", "--recipe", "mxfp8"),
    "inspect": ("nowhere.jsonl",),
    "replay": ("nowhere",),
    "export": ("out", "--hf", "nowhere", "--format", "plain", "--dtype", "fp7"),
    "doctor": ("more",),
    "warmup": ("--recipe", "nvfp44"),
}
ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")


def test_every_command_is_tried():
    assert set(NAMES) == set(WRONG) == {*ARGUMENTS, "export"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run of the small GPT, for `replay`."""
    directory = tmp_path_factory.mktemp("run")
    result = CliRunner().invoke(
        app, ["train", "--recipe", "mxfp8", *TINY, "--save", str(directory), "--save-every", "1"]
    )
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture
def ran(tmp_path, checkpoint, monkeypatch):
    """Run a command in 80 columns, without a terminal unless the environment says that there is one."""
    monkeypatch.setattr(warmup, "warm_up", lambda: iter([warmup.Step("rowwise mxfp8", 0, 1)]))
    monkeypatch.setattr(runtime, "compiled_so_far", lambda: runtime.Compiled(7, 3, "/somewhere"))
    monkeypatch.chdir(tmp_path)

    def run(name, *more, **environment):
        arguments = [each.format(out=".", run=checkpoint) for each in (*ARGUMENTS[name], *more)]
        runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": None, "FORCE_COLOR": None, **environment})
        result = runner.invoke(app, [name, *arguments])
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_help_fits_80_columns_and_has_an_example(name):
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"]).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert f" crossgrain {name}" in shown.partition("Examples:")[2]
    assert "--json" in shown and ESCAPE not in shown


@pytest.mark.parametrize(
    "example",
    [
        example
        for command in LISTED
        for example in command.examples
        if command.name in ("explain", "formats", "plan") and "--import" not in example
    ],
)
def test_examples_that_need_no_file_run(example):
    _, *arguments = shlex.split(example)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ARGUMENTS)
def test_results_fit_80_columns_and_have_no_escape_codes(name, ran):
    result = ran(name)
    too_long = [line for line in result.stdout.splitlines() if len(line) > 80]
    assert not too_long
    assert result.stdout.strip() and ESCAPE not in result.output


@pytest.mark.parametrize("name", ARGUMENTS)
def test_json_is_all_that_goes_to_stdout(name, ran):
    result = ran(name, "--json")
    assert json.loads(result.stdout)
    assert ESCAPE not in result.output


@pytest.mark.parametrize("name", ["explain", "formats", "plan"])
def test_no_color_is_obeyed_on_a_terminal(name, ran):
    assert COLOUR.search("\x1b[1;31mred\x1b[0m") and not COLOUR.search("\x1b[1mbold\x1b[0m")
    assert not COLOUR.search(ran(name, FORCE_COLOR="1", NO_COLOR="1").output)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_without_a_traceback_and_ends_with_2(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, *WRONG[name]])
    assert result.exit_code == 2, result.output
    assert result.stderr.strip() and not result.stdout
    assert "Traceback" not in result.stderr and "[Errno" not in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 80


def test_text_is_broken_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    print_text("  one two three four five six seven\n\nblocks.0.attention.qkv.weight.of.a.long.name")
    shown = capsys.readouterr().out
    assert shown == "  one two three four five six\n    seven\n\nblocks.0.attention.qkv.weight.of.a.long.name\n"


def test_what_is_being_done_is_told_on_terminals_only(capsys, monkeypatch):
    for forced, told in (("0", False), ("1", True)):
        monkeypatch.setenv("FORCE_COLOR" if told else "NO_COLOR", forced)
        with at_work("writing a model"):
            pass
        said = capsys.readouterr()
        assert not said.out and ("writing a model" in said.err) is told
