"""``crossgrain search``: a report for the small GPT and for models of users; mistakes without tracebacks."""

import json
import sys

import pytest
from typer.testing import CliRunner

from crossgrain.gpt import GPTConfig, Preset, training
from crossgrain_command.app import app


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    model = GPTConfig(layers=1, width=32, heads=2, context=16)
    monkeypatch.setitem(training.PRESETS, "tiny", Preset(model, batch=2, steps=4, learning_rate=1e-2))
    monkeypatch.setattr("crossgrain.cli.search._FEWEST_STEPS", 4)
    monkeypatch.setattr("crossgrain.cli.search._MOST_STEPS", 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(*arguments):
    return CliRunner().invoke(app, ["search", *arguments])


MINE = """
import torch
from torch.nn.functional import cross_entropy
from crossgrain import convert
from crossgrain.lab import Start

data = [(torch.randn(32, 32), torch.randint(16, (32,))) for _ in range(8)]

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])

def branch(recipe, seed):
    own = model()
    if recipe is not None:
        convert(own, recipe)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step in range(4):
        value = loss(own, data[(seed + step) % 8])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield value.item()

def start():
    return Start(model(), data, loss, branch=branch, steps=4, name="my model")
"""


def test_a_model_of_the_user_gets_a_report_and_json(tmp_path):
    (tmp_path / "my_search_module.py").write_text(MINE)
    arguments = ("--from", "my_search_module:start", "--minutes", "0.1", "--tokens", "16384", "--scale", "64")
    result = run(*arguments, "--saving", "0.5", "--rule", "2: hp", "--json", "--out", "mine")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "2: hp" in found["found"]["recipe"] and (tmp_path / found["files"]["report"]).exists()
    assert "my model" in (tmp_path / "mine" / "report.html").read_text()


def test_the_small_gpt_is_searched_and_shown(tmp_path):
    result = run("--minutes", "0.1", "--max-gap", "0.5", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert "report: out/report.html" in result.output and "gap to high precision" in result.output
    assert (tmp_path / "out" / "gpt-tiny.pt").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--saving", "0.5", "--max-gap", "0.1"), "give --saving or --max-gap, not both"),
        (("--device", "abacus"), "abacus"),
        (("-c", "nvfp5"), "not a format"),
        (("--rule", "nothing.*: hp"), "matches no layer"),
    ],
)
def test_mistakes_are_shown_without_a_traceback(arguments, message):
    result = run(*arguments, "--minutes", "0.1", "--steps", "3")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output
