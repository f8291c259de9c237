"""The command line prints what it says, for people and as JSON."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import crossgrain as cg
from crossgrain.cli.app import app
from crossgrain.kernels import warmup
from crossgrain.kernels.cpu import runtime

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


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_how_to_install_it(missing, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("crossgrain.cli") or name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(cg, "cli", None)  # importing it again sets it, and this puts it back
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("crossgrain.cli").main()
    assert exit_.value.code == f"The crossgrain command needs {missing}: pip install 'crossgrain[cli]'"
