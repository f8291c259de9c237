"""Recipes are compared with fp32 by seed, and the numbers mean what they say."""

import json
import math

import pytest

from crossgrain.gpt import Run
from crossgrain.lab import compare
from crossgrain.lab.compare import BASELINE, Comparison
from crossgrain.lab.intervals import estimate
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
    assert rows[BASELINE].paired is None and rows[BASELINE].time == rows[BASELINE].saved == 1
    assert abs(rows["hp"].paired.gap.mean) < 1e-4
    expected = [
        run.validation_loss - exact.validation_loss
        for run, exact in zip(comparison.runs["mxfp8"], comparison.runs[BASELINE], strict=True)
    ]
    assert rows["mxfp8"].paired.gap == estimate(expected) and rows["mxfp8"].paired.gap.half_width > 0


def test_it_can_be_written_as_json_and_drawn(comparison, tmp_path):
    written = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert written["recipes"].keys() == RECIPES.keys()
    assert written["rows"][2]["paired"]["gap"]["mean"] == comparison.rows()[2].paired.gap.mean
    assert "errors" not in json.dumps(written)  # those of single GEMMs do not explain a gap
    draw(comparison, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_the_runs_that_are_finished(tmp_path):
    def interrupt(label, seed, run):
        if label == "mxfp8" and len(run.losses) == 2:
            raise KeyboardInterrupt

    result = compare(SHORT, {"hp": RECIPES["hp"], "mxfp8": RECIPES["mxfp8"]}, [0], interrupt)
    assert result.interrupted and [row.label for row in result.rows()] == [BASELINE, "hp"]
    assert len(result.runs["mxfp8"][0].losses) == 2
    assert math.isinf(result.rows()[1].paired.gap.half_width)
    draw(result, tmp_path / "compare.png")
    json.dumps(result.to_dict(), allow_nan=False)


def made(losses, tolerance=None):
    """A comparison of runs with these validation losses: by label, one list for each seed."""
    runs = {
        label: [
            Run(label, seed, [1.0] * 10, [(10 * i, loss) for i, loss in enumerate(each, 1)], [0.1] * 10, 100)
            for seed, each in enumerate(by_seed)
        ]
        for label, by_seed in losses.items()
    }
    recipes = {label: RECIPES["hp"] for label in losses if label != BASELINE}
    return Comparison(SHORT, recipes, range(3), tolerance, runs)


def test_verdicts_and_growth_are_those_of_paired_runs():
    flat = [[2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0]]
    grown = [[loss + 0.1 * i + 0.001 * seed for i, loss in enumerate(each)] for seed, each in enumerate(flat)]
    above = [[loss + 0.2 + 0.001 * seed for loss in each] for seed, each in enumerate(flat)]
    rows = made({BASELINE: flat, "same": flat, "grown": grown, "above": above}, tolerance=0.25).rows()
    assert [row.verdict for row in rows] == [
        None, "not above the tolerance", "above the tolerance", "not above the tolerance"
    ]  # fmt: skip
    assert [row.paired.grows for row in rows[1:]] == [False, True, False]
    assert rows[2].paired.growth.mean == pytest.approx(0.01)  # per step; validations are 10 steps apart
    assert rows[3].paired.p_value < 0.05


def test_a_recipe_that_diverges_has_no_gap(tmp_path):
    flat = [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    result = made({BASELINE: flat, "bad": [[2.0, 2.0], [3.0, math.nan], [4.0, 4.0]]})
    row = result.rows()[1]
    assert row.verdict == "diverged" and row.diverged == {1: 20} and row.paired is None and math.isnan(row.loss)
    json.dumps(result.to_dict(), allow_nan=False)
    draw(result, tmp_path / "compare.png")
