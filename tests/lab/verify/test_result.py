"""A verification says what its runs show, in numbers, in words and in a file."""

import json
import math

import pytest

from crossgrain.lab import Verification
from crossgrain.lab.verify import BranchRun


def made(gaps, tolerance=None, steps=8, slope=0.0):
    """Runs of recipes whose losses are above those of the baseline by these gaps, one for each seed."""
    seeds = list(range(max(map(len, gaps.values()))))
    result = Verification(dict.fromkeys(gaps, "mxfp8"), "high precision", None, seeds, steps, steps // 2, tolerance)
    for seed in seeds:
        exact = [1 / (1 + step) + seed for step in range(steps)]
        result.runs.append(BranchRun("high precision", seed, losses=exact))
        for label, by_seed in gaps.items():
            if seed < len(by_seed):
                losses = [loss + by_seed[seed] + slope * step for step, loss in enumerate(exact)]
                result.runs.append(BranchRun(label, seed, losses=losses))
    return result


def test_a_file_has_everything(tmp_path):
    result = made({"a": [0.1, 0.2, 0.3], "b": [0.5, 0.6, 0.7]}, tolerance=0.4)
    result.save(tmp_path / "v.json")
    assert Verification.load(tmp_path / "v.json") == result
    written = json.loads((tmp_path / "v.json").read_text())
    assert written["rows"][1]["paired"]["gap"]["mean"] == result.gap("a").mean == pytest.approx(0.2)
    assert [row["verdict"] for row in written["rows"]] == [None, "not above the tolerance", "above the tolerance"]
    assert written["may_be_claimed"] and written["may_not_be_claimed"]


def test_recipes_are_compared_with_each_other_on_the_seeds_that_both_have():
    result = made({"a": [0.1, 0.2, 0.3], "b": [0.5, 0.6]})
    assert result.paired("b", "a").by_seed == pytest.approx({0: 0.4, 1: 0.4})
    assert result.gap("a", "b").mean == pytest.approx(-0.4)


def test_the_curve_is_the_gap_by_step():
    curve = made({"a": [0.1, 0.3]}, steps=24, slope=0.01).curve("a", smooth=1)
    assert [point.mean for point in curve] == pytest.approx([0.2 + 0.01 * step for step in range(24)])
    smoothed = made({"a": [0.1, 0.3]}, steps=24, slope=0.01).curve("a")  # two steps each
    assert smoothed[5].mean == pytest.approx(0.2 + 0.01 * 5.5)


def test_what_is_not_there_is_named():
    result = made({"a": [0.1, 0.2]})
    with pytest.raises(KeyError, match="there is no recipe 'c'; there are: high precision, a"):
        result.gap("c")
    result.runs = result.runs[:1]
    with pytest.raises(ValueError, match="no pair of runs of a and high precision is finished"):
        result.gap("a")
    assert result.curve("a") == [] and [row.label for row in result.rows()] == ["high precision"]


def test_words_say_how_sure_they_are():
    one = str(made({"a": [0.1]}))
    assert "one seed gives a gap of 0.1; how far it is from chance is not known" in one
    unclear = str(made({"a": [-0.1, 0.1, 0.2]}, tolerance=0.15))
    assert "is above the tolerance of 0.15 is not resolved; about" in unclear and "seeds would" in unclear
    growing = str(made({"a": [0.1, 0.11, 0.12]}, slope=0.01))
    assert "GROWS" in growing and "the gap grew by 1" in growing and "above 0" in growing
    assert "short run" in growing and "never" not in growing


def test_nothing_is_ever_called_safe():
    shown = str(made({"a": [0.0, 1e-9, 2e-9]}, tolerance=0.1))
    assert "not above the tolerance" in shown
    assert shown.lower().count("safe") == 1 and '"Safe", or "the same as the baseline"' in shown


@pytest.mark.parametrize("data", [{}, {"verification": 2}, {"verification": 1}, {"verification": 1, "recipes": 3}])
def test_other_data_is_refused(data):
    with pytest.raises(ValueError, match="this is not a verification"):
        Verification.from_dict(data)


def test_losses_that_are_not_known_are_none_in_json():
    result = made({"a": [0.1]})
    assert result.to_dict()["rows"][1]["paired"]["gap"]["high"] is None and math.isinf(result.gap("a").high)
