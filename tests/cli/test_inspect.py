"""``crossgrain inspect``: a file as a table or as JSON, or a small GPT that is trained for it."""

import json

import pytest
from typer.testing import CliRunner

from crossgrain.gpt import GPTConfig, Preset, training
from crossgrain_command.app import app


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    model = GPTConfig(layers=1, width=32, heads=2, context=16)
    monkeypatch.setitem(
        training.PRESETS, "tiny", Preset(model, batch=4, steps=4, learning_rate=1e-2, validation_batch=4)
    )


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(argument) for argument in arguments])


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_small_gpt_is_trained_and_its_file_can_be_shown_again(tmp_path):
    path = tmp_path / "stats.jsonl"
    shown = run(
        "inspect", "-r", "mxfp8-fwd-nvfp4-bwd", "--steps", 4, "--what-if", "nvfp4,mxfp8", "--every", 2, "--out", path
    )
    assert max(map(len, shown.splitlines())) <= 80
    assert "step 2: planes with the largest errors, by GEMM" in shown and "first bad step: none" in shown
    assert "not quantized: head (Linear)" in shown
    again = run("inspect", path)
    assert again in shown  # which begins with the recipe
    more = run("inspect", path, "--all", "--step", 2)
    assert len(more.splitlines()) >= len(again.splitlines())
    fewer = run("inspect", path, "--top", 1)
    assert fewer.count("with smaller errors") == 3


def test_json_has_the_records_of_the_look(tmp_path):
    found = json.loads(run("inspect", "-r", "mxfp8", "--steps", 2, "--json"))
    assert found["steps"] == [1] and found["first_bad_step"] is None
    assert {record["gemm"] for record in found["records"]} == {"fprop", "dgrad", "wgrad"}
    assert len(found["records"]) == 4 * 6


def test_options_of_training_are_refused_with_a_file(tmp_path):
    result = invoke("inspect", tmp_path / "stats.jsonl", "--recipe", "mxfp8", "--steps", 4)
    assert result.exit_code == 2 and "--recipe, --steps cannot be combined with a file" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["--what-if", "nvfp5"], "there is no preset or format 'nvfp5'"),
        (["--recipe", "nvfp5"], "nvfp5"),
        (["-r", "mxfp8", "--step", "77"], "there was no look at step 77"),
    ],
)
def test_mistakes_are_shown_without_a_traceback(arguments, message):
    result = invoke("inspect", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
