"""``crossgrain sensitivity``: the small GPT, and models of users."""

import json
import sys

import pytest
from typer.testing import CliRunner

from crossgrain.gpt import GPTConfig, Preset, training
from crossgrain.lab import Sensitivity
from crossgrain_command.app import app


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    model = GPTConfig(layers=1, width=32, heads=2, context=16)
    monkeypatch.setitem(training.PRESETS, "tiny", Preset(model, batch=4, steps=4, learning_rate=1e-2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # --from adds the current directory


def run(*arguments):
    return CliRunner().invoke(app, ["sensitivity", *arguments])


def test_the_small_gpt_is_measured_and_a_second_call_finds_everything(tmp_path):
    arguments = ("--batches", "2", "--out", "s.json", "-c", "nvfp4; mxfp4", "--base", "hp", "--groups", "block")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "blocks.0.mlp.fc1" in result.output and "mxfp4 (fprop: mxfp4" in result.output
    s = Sensitivity.load(tmp_path / "s.json")
    assert list(s.candidates) == ["hp", "nvfp4", "mxfp4"] and set(s.layers) > {"head"}
    again = run(*arguments, "--json")
    assert json.loads(again.stdout)["sites"] == s.to_dict()["sites"]


MINE = """
import torch
from torch.nn.functional import cross_entropy
from crossgrain.lab import Start

def start():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    batches = [(torch.randn(32, 16), torch.randint(8, (32,))) for _ in range(3)]
    return Start(model, batches, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))

def wrong():
    return 3

number = 3
"""


def test_a_model_of_the_user(tmp_path):
    (tmp_path / "my_start_module.py").write_text(MINE)
    result = run("--from", "my_start_module:start", "--out", "mine.json", "--batches", "3")
    assert result.exit_code == 0, result.output
    assert set(Sensitivity.load(tmp_path / "mine.json").layers) == {"0", "2"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--from", "my_start_module:wrong"), "must return a crossgrain.lab.Start, got int"),
        (("--from", "my_start_module:missing"), "has no function 'missing'"),
        (("--from", "my_start_module:number"), "is not a function but a int"),
        (("--from", "my_start_module"), "write it as module:function"),
        (("--from", "no_such_module_at_all:start"), "there is no such module"),
        (("-c", "nvfp5"), "not a format"),
        (("--base", "mxfp9"), "mxfp9"),
    ],
)
def test_mistakes_are_shown_without_a_traceback(tmp_path, arguments, message):
    (tmp_path / "my_start_module.py").write_text(MINE)
    result = run(*arguments, "--batches", "2")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output
