"""train --save and replay: the step is that of the run, functions of users, mistakes that are pointed at."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from crossgrain.files import save_checkpoint
from crossgrain.gpt import GPTConfig, Preset, training
from crossgrain_command.app import app


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    """The smallest size, smaller; and a directory of the user's."""
    model = GPTConfig(layers=1, width=32, heads=2, context=16)
    monkeypatch.setitem(
        training.PRESETS, "tiny", Preset(model, batch=4, steps=4, learning_rate=1e-2, validation_batch=4)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(argument) for argument in arguments])


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def words(result):
    return " ".join(result.output.split())


def trained(*options, recipe="nvfp4"):
    return json.loads(run("train", "-r", recipe, "--save", "run", "--save-every", 2, "--json", *options))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_the_step_after_a_checkpoint_is_that_of_the_run(recipe):
    losses = trained(recipe=recipe)["losses"]
    result = json.loads(run("replay", "run/step-00000002", "--runs", 8, "--json"))
    assert result["step"] == "Step 3 of the GPT in run/step-00000002"
    assert result["low"]["loss"] == result["expected_loss"] == losses[2]
    assert result["low"]["loss_after"] is not None
    result = json.loads(run("replay", "run/step-00000002", "--at", 4, "--runs", 8, "--json"))
    assert result["low"]["loss"] == result["expected_loss"] == losses[3]


def test_the_latest_checkpoint_is_taken_and_the_report_printed():
    trained()
    shown = run("replay", "run", "--measure", "gradient-norm", "--runs", 20)
    assert "Step 5 of the GPT in run\n" in shown and "The step was repeated bit for bit.\n" in shown
    assert "difference explained" in shown and "in the gradient norm" in shown


def test_another_recipe_is_another_step():
    losses = trained()["losses"]
    result = json.loads(run("replay", "run/step-00000002", "--recipe", "mxfp8", "--runs", 8, "--json"))
    assert result["step"].endswith(", with the recipe mxfp8")
    assert result["expected_loss"] is None and result["low"]["loss"] != losses[2]


def test_train_saves_only_where_it_is_asked_to():
    assert words(invoke("train", "--save-every", 2)) == "--save-every needs --save, the directory for the checkpoints"
    trained()
    again = invoke("train", "--save", "run")
    assert again.exit_code == 2 and "there are checkpoints of another run" in words(again)


USER = """
import torch
import crossgrain as cg
from crossgrain.files import load_checkpoint
from crossgrain.lab import ReplayStep

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 32))
    cg.convert(model, "nvfp4", include=["2"])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def loss_fn(model, x):
    return model(x).square().mean()

def step(path):
    model, optimizer = build()
    done = load_checkpoint(path, model=model, optimizer=optimizer)
    return ReplayStep(model, [torch.randn(32, 32)], loss_fn, optimizer)

def generator(path):
    made, noise = step(path), torch.Generator()
    made.loss_fn = lambda model, x: loss_fn(model, x + torch.randn(x.shape, generator=noise))
    return made

def nothing(path):
    return 3
"""


@pytest.fixture
def user(tmp_path):
    """A training program of a user's, after two steps, and the losses of the next ones."""
    name = f"user_program_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER)
    sys.path.insert(0, str(tmp_path))
    program = __import__(name)
    model, optimizer = program.build()
    losses = []
    for number in range(4):
        if number == 2:
            save_checkpoint("mine", 2, model=model, optimizer=optimizer)
        loss = program.loss_fn(model, torch.randn(32, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return name, losses


def test_a_step_of_a_user_is_the_next_one_of_the_run(user):
    name, losses = user
    torch.manual_seed(99)
    shown = run("replay", "mine", "--step-from", f"{name}:step", "--runs", 12, "--loss", repr(losses[2]))
    assert "its loss is exactly that of the training run" in shown
    assert f"The step of {name}:step, mine" in shown


def test_mistakes_are_pointed_at(user, tmp_path):
    name, _ = user
    for arguments, message in (
        (["nowhere"], "there is no checkpoint in nowhere"),
        (["mine"], "was not saved by crossgrain train"),
        (["mine", "-s", "train"], "write it as module:function"),
        (["mine", "-s", f"{name}:nothing"], "it must return a crossgrain.lab.ReplayStep, got int"),
        (["mine", "-s", f"{name}:step", "--at", "3"], "--at is for checkpoints of crossgrain train"),
        (["mine", "-s", f"{name}:step", "--recipe", "mxfp9"], "mxfp9"),
    ):
        result = invoke("replay", *arguments)
        assert result.exit_code == 2 and message in words(result), result.output
    result = invoke("replay", "mine", "-s", f"{name}:generator")
    assert result.exit_code == 1 and "the step is not the same when it is repeated" in words(result)
    trained()
    result = invoke("replay", "run", "--at", 2)
    assert result.exit_code == 2 and "4 steps are done already" in words(result)
