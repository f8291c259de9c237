"""explain, train and compare: screens that fit, JSON that parses, mistakes that are pointed at."""

import json
import sys

import pytest
from typer.testing import CliRunner

from crossgrain.cli.recipes import labelled, split_recipes
from crossgrain.gpt import GPTConfig, Preset, training
from crossgrain_command.app import app


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """The smallest size, smaller."""
    model = GPTConfig(layers=1, width=32, heads=2, context=16)
    monkeypatch.setitem(
        training.PRESETS, "tiny", Preset(model, batch=4, steps=4, learning_rate=1e-2, validation_batch=4)
    )


def invoke(*arguments, columns=80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])


def run(*arguments, columns=80):
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def fits(text, columns):
    return max(map(len, text.splitlines())) <= columns


# ---- explain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_explain(columns):
    shown = run("explain", "--recipe", "nvfp4; first 1 block: mxfp8; head: hp", "--model", "tiny", columns=columns)
    assert fits(shown, columns)
    assert "rule 1 (first 1 block)" in shown and "blocks.0.mlp.fc2" in shown


def test_explain_without_a_model_shows_the_rules():
    assert "rule 1 (head)" in run("explain", "-r", "mxfp8; head: hp")


def test_models_of_transformers_need_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    result = invoke("explain", "--recipe", "mxfp8", "--hf", "config.json")
    assert result.exit_code == 2 and "pip install 'crossgrain[hf]'" in " ".join(result.output.split())


def test_explain_as_json():
    result = json.loads(run("explain", "-r", "mxfp8; head: hp", "--model", "tiny", "--json"))
    rows = [row for row in result["rows"] if row["layer"] == "head"]
    assert len(rows) == 6 and {row["format"] for row in rows} == {"hp"}


@pytest.mark.parametrize("columns", [80, 120])
def test_explain_shows_the_phases_of_a_schedule(columns):
    line = "nvfp4; first 1 block: mxfp8; last 10 % of steps: fprop: hp"
    shown = run("explain", "-r", line, "--model", "tiny", "--steps", 1000, columns=columns)
    assert fits(shown, columns)
    assert "from step 0: no phase" in shown and "from step 900: 'last 10 % of steps'" in shown
    assert "from step" not in run("explain", "-r", line)
    result = json.loads(run("explain", "-r", line, "--steps", 1000, "--json"))
    assert [phase["start"] for phase in result["phases"]] == [0, 900]
    assert result["phases"][1]["rows"][0]["format"] == "hp"


# ---- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["explain", "-r"], ["train", "-r"], ["compare", "-r"]])
def test_a_mistake_in_a_recipe_is_pointed_at(command):
    line = "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rth, sr)"
    result = invoke(*command, line)
    assert result.exit_code == 2
    message, text, carets = result.stderr.splitlines()
    assert message == "nvfp4 has no option 'rth'; did you mean 'rht'?"
    assert text.strip() == line and text[carets.index("^") : carets.rindex("^") + 1] == "rth"


def test_a_long_recipe_is_cut_so_that_the_caret_stays_in_place():
    result = invoke("explain", "-r", "mxfp8; " + "; ".join(f"layers.{i}.fc: hp" for i in range(20)) + "; a: nvfp5")
    *_, text, carets = result.stderr.splitlines()
    assert len(text) <= 80 and text[carets.index("^") : carets.rindex("^") + 1] == "nvfp5"


@pytest.mark.parametrize("command", [["explain", "--model", "tiny"], ["train"], ["compare"]])
def test_a_rule_for_layers_that_are_not_there_is_a_mistake(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*command, "-r", "mxfp8; lm_head: hp")
    assert result.exit_code == 2 and "near misses: head" in result.stderr
    assert not list(tmp_path.iterdir())


# ---- train -----------------------------------------------------------------------------------------------


def test_train_tells_the_validation_loss():
    shown = run("train", "-r", "mxfp8; head: hp", "--size", "tiny", "--steps", 3)
    assert fits(shown, 80) and "done after 3 steps: validation loss" in shown


def test_schedules_are_trained_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run("train", "-r", "mxfp8; last 1 step: hp", "--steps", 3)
    assert "done after 3 steps" in shown
    result = json.loads(run("compare", "-r", "mxfp8; last 50 % of steps: hp", "--seeds", 1, "--json"))
    assert result["recipes"]["recipe A"].endswith("; last 50 % of steps: hp")
    refused = invoke("plan", "--model", "lab-tiny", "-r", "nvfp4-late-hp")
    assert refused.exit_code == 2 and "ScheduledConversion" in refused.stderr


def test_train_as_json():
    result = json.loads(run("train", "-r", "mxfp8", "--json", "--seed", 5))
    assert len(result["losses"]) == 4 and result["seed"] == 5
    assert result["validation_loss"] == result["validation"][-1][1]


def test_a_training_that_is_stopped_says_so(monkeypatch):
    monkeypatch.setattr(training.Trainer, "_step", lambda self: interrupted_after(self, 2))
    result = invoke("train")
    assert result.exit_code == 130 and "stopped after 2 steps" in result.stdout


def interrupted_after(trainer, steps):
    if len(trainer.run.losses) == steps:
        raise KeyboardInterrupt
    trainer.run.losses.append(5.0)
    trainer.run.step_seconds.append(0.1)


# ---- compare ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_compare_shows_a_table_and_says_where_the_picture_is(tmp_path, columns):
    shown = run("compare", "-r", "mxfp8,mxfp8-fwd-nvfp4-bwd", "--seeds", 2, "--out", tmp_path, columns=columns)
    table, _, rest = shown.partition("gap:")
    assert fits(table, columns) and "…" not in table
    names = [line.split()[0] for line in table.splitlines() if line.strip()]
    assert names[-3:] == ["fp32", "mxfp8", "mxfp8-fwd-nvfp4-bwd"]
    assert f"picture: {tmp_path / 'compare.png'}" in rest
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert [row["label"] for row in saved["rows"]] == names[-3:]


def test_compare_shows_verdicts_and_no_errors_of_gemms(tmp_path):
    shown = run("compare", "-r", "mxfp8", "--seeds", 2, "--tolerance", 1000, "--out", tmp_path)
    assert "not above" in shown and "the tolerance of 1000" in " ".join(shown.split())
    assert not {"fprop", "dgrad", "wgrad"} & set(shown.split())
    row = json.loads((tmp_path / "compare.json").read_text())["rows"][1]
    assert row["verdict"] == "not above the tolerance" and row["paired"]["gap"]["count"] == 2


def test_a_run_that_diverges_is_named(tmp_path, monkeypatch):
    step = training.Trainer._step

    def diverging(self):
        step(self)
        if self.run.recipe is not None and self.run.seed == 1:
            self.run.losses[-1] = float("nan")

    monkeypatch.setattr(training.Trainer, "_step", diverging)
    shown = " ".join(run("compare", "-r", "hp", "--seeds", 2, "--out", tmp_path).split())
    assert "hp diverged" in shown and "hp diverged: seed 1 at step 1." in shown


def test_compare_as_json(tmp_path):
    shown = run("compare", "-r", "hp", "--seeds", 1, "--out", tmp_path, "--json")
    assert json.loads(shown) == json.loads((tmp_path / "compare.json").read_text())


def test_a_comparison_that_is_stopped_keeps_what_was_done(tmp_path, monkeypatch):
    step, calls = training.Trainer._step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(training.Trainer, "_step", interrupted)
    result = invoke("compare", "-r", "hp", "--seeds", 1, "--out", tmp_path)
    assert result.exit_code == 130 and "stopped after 1 of 2 runs" in result.stdout
    assert json.loads((tmp_path / "compare.json").read_text())["interrupted"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mxfp8,nvfp4", ["mxfp8", "nvfp4"]),
        ("mxfp8, dgrad: nvfp4, nvfp4", ["mxfp8, dgrad: nvfp4", "nvfp4"]),
        (
            "fprop: mxfp8, dgrad: hp, wgrad: nvfp4(rht, sr),fp8",
            ["fprop: mxfp8, dgrad: hp, wgrad: nvfp4(rht, sr)", "fp8"],
        ),
        ("mxfp8; head: hp,nvfp4; head: hp", ["mxfp8; head: hp", "nvfp4; head: hp"]),
    ],
)
def test_commas_separate_recipes_unless_a_setting_follows(text, expected):
    assert split_recipes([text]) == expected


def test_long_recipes_get_letters():
    assert list(labelled(["mxfp8", "mxfp8; head|blocks.0.mlp.fc1: hp"])) == ["mxfp8", "recipe B"]
    many = [f"mxfp8; blocks.{number}.mlp.fc1: hp" for number in range(30)]
    assert [recipe.rules[0].pattern for recipe in labelled(many).values()] == [
        f"blocks.{number}.mlp.fc1" for number in range(30)
    ]
