"""Recipes are compared with fp32 by seed, and the numbers mean what they say."""

import json
import math

import pytest

from crossgrain.lab import compare
from crossgrain.lab.compare import BASELINE
from crossgrain.lab.picture import draw
from crossgrain.recipe import GemmRecipe

from ..gpt.test_training import SHORT

RECIPES = {name: GemmRecipe.load(name) for name in ("hp", "mxfp8", "nvfp4-fwd-hp-bwd")}


@pytest.fixture(scope="module")
def comparison():
    return compare(SHORT, RECIPES, seeds=range(2))


def test_every_recipe_runs_with_every_seed(comparison):
    assert list(comparison.runs) == [BASELINE, *RECIPES]
    assert all([run.seed for run in runs] == [0, 1] for runs in comparison.runs.values())


def test_the_gap_is_to_fp32_with_the_same_seed(comparison):
    rows = {row.label: row for row in comparison.rows()}
    assert rows[BASELINE].gap == 0 and rows[BASELINE].time == rows[BASELINE].saved == 1
    assert abs(rows["hp"].gap) < 1e-4
    expected = [
        run.validation_loss - exact.validation_loss
        for run, exact in zip(comparison.runs["mxfp8"], comparison.runs[BASELINE], strict=True)
    ]
    assert rows["mxfp8"].gap == pytest.approx(sum(expected) / 2) and rows["mxfp8"].spread > 0


def test_errors_are_of_the_gemms_that_a_recipe_quantizes(comparison):
    errors = {row.label: row.errors for row in comparison.rows()}
    assert max(errors["hp"].values()) < 1e-5
    assert all(0.005 < error < 0.1 for error in errors["mxfp8"].values())
    forward_only = errors["nvfp4-fwd-hp-bwd"]
    assert forward_only["fprop"] > errors["mxfp8"]["fprop"]
    assert comparison.errors["mxfp8"].keys() == {
        "blocks.0.attention.qkv", "blocks.0.attention.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"
    }  # fmt: skip


def test_it_can_be_written_as_json_and_drawn(comparison, tmp_path):
    assert json.loads(json.dumps(comparison.to_dict(), allow_nan=False))["recipes"].keys() == RECIPES.keys()
    draw(comparison, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_the_runs_that_are_finished(tmp_path):
    def interrupt(label, seed, run):
        if label == "mxfp8" and len(run.losses) == 2:
            raise KeyboardInterrupt

    result = compare(SHORT, {"hp": RECIPES["hp"], "mxfp8": RECIPES["mxfp8"]}, [0], interrupt)
    assert result.interrupted and [row.label for row in result.rows()] == [BASELINE, "hp"]
    assert len(result.runs["mxfp8"][0].losses) == 2
    assert math.isnan(result.rows()[1].spread)
    draw(result, tmp_path / "compare.png")
    json.dumps(result.to_dict(), allow_nan=False)
