"""The command line prints what it says, for people and as JSON."""

import importlib
import json
import os
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import crossgrain as cg
from crossgrain.kernels import warmup
from crossgrain.kernels.cpu import runtime
from crossgrain_command.app import COMMANDS, app
from crossgrain_command.mistakes import debugging, told_in_a_message

NAMES = [fmt.name for fmt in cg.formats.formats()]


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_formats_fit_a_terminal():
    lines = run("formats").splitlines()
    assert max(map(len, lines)) <= 80
    by_name = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert by_name.keys() >= set(NAMES)
    assert by_name["mxfp8"] == ["mxfp8", "e4m3", "1x32", "E8M0,", "rounded", "up", "8.25", "448"]
    assert by_name["identity"] == ["identity", "-", "-", "-", "16.00", "-"]


def test_formats_as_json():
    formats = {entry["name"]: entry for entry in json.loads(run("formats", "--json"))}
    assert list(formats) == NAMES
    nvfp4 = formats["nvfp4"]
    assert (nvfp4["element"], nvfp4["block"], nvfp4["scale"]) == ("e2m1", [1, 16], "two_level")
    assert (nvfp4["amax_per"], nvfp4["bits_per_element"], nvfp4["max"]) == ("tensor", 4.5, 6.0)


@pytest.fixture
def two_steps(monkeypatch):
    """A warm-up that has nothing to do; what it does is tested elsewhere."""
    steps = [warmup.Step("rowwise mxfp8", 0, 2), warmup.Step("columnwise mxfp8", 1, 2)]
    monkeypatch.setattr(warmup, "warm_up", lambda: iter(steps))
    monkeypatch.setattr(runtime, "compiled_so_far", lambda: runtime.Compiled(7, 3, "/somewhere"))


@pytest.mark.usefixtures("two_steps")
def test_warmup_tells_where_the_cache_is():
    printed = run("warmup")
    assert "7 kernels" in printed and "3 of them from the cache" in printed
    assert "cache: /somewhere" in printed
    result = json.loads(run("warmup", "--json"))
    assert {**result, "seconds": 0} == {"kernels": 7, "from_cache": 3, "seconds": 0, "cache": "/somewhere"}


@pytest.mark.parametrize("recipe, said", [("mxfp8", False), ("nvfp4-fp8-attention", True)])
def test_a_warmup_for_a_recipe_says_that_attention_is_left_out(monkeypatch, two_steps, recipe, said):
    monkeypatch.setattr("crossgrain.nn.warm_recipe._train", lambda recipe, dtype: None)
    result = CliRunner().invoke(app, ["warmup", "--recipe", recipe])
    assert result.exit_code == 0 and ("attention" in result.stderr) == said


@pytest.mark.usefixtures("two_steps")
def test_a_warmup_that_leaves_nothing_behind_fails(monkeypatch):
    monkeypatch.setattr(runtime, "compiled_so_far", lambda: runtime.Compiled(7, 0, None))
    result = CliRunner().invoke(app, ["warmup"])
    assert result.exit_code == 1 and "no directory to store them is writable" in result.stderr


def test_a_warmup_without_compiled_kernels_fails():
    try:
        cg.set_backend("reference")
        result = CliRunner().invoke(app, ["warmup"])
    finally:
        cg.set_backend("auto")
    assert result.exit_code == 1 and "switched off" in result.stderr


def test_python_m_crossgrain():
    command = [sys.executable, "-m", "crossgrain", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert "Usage: crossgrain" in result.stdout and "warmup" in result.stdout


# For a shell, what completes a word is the program itself, with other environment variables.
COMPLETING = {"_CROSSGRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "crossgrain ex", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    "arguments, environment, shown",
    [
        (["--help"], {}, "Train the same small GPT"),
        (["--version"], {}, f"crossgrain {cg.__version__}\n"),
        ([], COMPLETING, "explain\nexport"),
    ],
    ids=["help", "version", "completion"],
)
def test_what_answers_at_once_does_not_import_torch(arguments, environment, shown):
    code = f"""
import sys
from crossgrain_command import main
sys.argv = ["crossgrain", *{arguments}]
try:
    main()
finally:
    print(*sorted({{"torch", "crossgrain"}} & sys.modules.keys()), file=sys.stderr)
"""
    environment = {**os.environ, "COLUMNS": "80", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert done.stderr == "\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_how_to_install_it(missing, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("crossgrain_command", missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("crossgrain_command").main()
    assert exit_.value.code == f"The crossgrain command needs {missing}: pip install 'crossgrain[cli]'"


# ---- help and mistakes -------------------------------------------------------------------------------------

LISTED = [command for commands in COMMANDS.values() for command in commands]


def test_the_help_has_all_commands_by_what_they_are_for():
    shown = run("--help")
    assert [title for title in COMMANDS if f"─ {title} ─" in shown] == list(COMMANDS)
    assert {command.name for command in LISTED} == set(typer.main.get_command(app).commands)
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("command", LISTED, ids=lambda command: command.name)
def test_examples_of_a_command_name_it_and_its_options(command):
    options = {name for each in command.load().params for name in (*each.opts, *each.secondary_opts)}
    shown = " ".join(run(command.name, "--help").split())
    for example in command.examples:
        program, *words = shlex.split(example)
        assert program == "crossgrain" and command.name in words
        own = words[words.index(command.name) + 1 :]
        assert {word for word in own if word.startswith("--")} <= options
        assert " ".join(example.split()) in shown


def test_a_mistake_is_a_message_and_with_debug_a_traceback(capsys, monkeypatch):
    def fail():
        with told_in_a_message():
            raise ValueError("there is no such thing")

    with pytest.raises(SystemExit) as ended:
        fail()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert said.err.startswith("crossgrain: there is no such thing\n") and "--debug" in said.err and not said.out
    monkeypatch.setattr(debugging, "on", True)
    with pytest.raises(ValueError, match="no such thing"):
        fail()


def test_what_is_not_a_mistake_keeps_its_traceback():
    with pytest.raises(AssertionError), told_in_a_message():
        raise AssertionError


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_in_a_program_of_the_user_shows_its_place_with_debug(debug, tmp_path):
    (tmp_path / "mine.py").write_text("def start():\n    raise ValueError('a model of my own')\n")
    arguments = [*(["--debug"] if debug else []), "sensitivity", "--from", "mine:start"]
    command = [sys.executable, "-m", "crossgrain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 2 and "a model of my own" in done.stderr
    assert ("Traceback" in done.stderr) == debug
