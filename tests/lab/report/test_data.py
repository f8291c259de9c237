"""The data of a page are the results: numbers, recipes, choices; and what does not fit together is refused."""

import json
import re
from types import SimpleNamespace

import pytest

from crossgrain.lab import write_report
from crossgrain.lab.intervals import Estimate
from crossgrain.lab.report.numbers import short
from crossgrain.lab.sensitivity import Site
from crossgrain.lab.verify import BranchRun

from . import samples


def joined(data, numbers):
    return "".join(data["pieces"][number] for number in numbers)


def test_all_effects_are_those_of_the_result_to_five_digits(written):
    result = samples.sensitivity()
    data = written(sensitivity=result).data
    names = [layer[0] for layer in data["layers"]]
    for site in json.loads(json.dumps(result.to_dict()))["sites"]:
        for number, candidate in enumerate(data["candidates"]):
            for quantity, values in site["effects"][candidate["label"]].items():
                shown = data["effects"][number][f"{site['gemm']}.{quantity}"][names.index(site["layer"])]
                assert shown == [float(f"{value:.5g}") for value in values[:3]]
    assert data["loss"] == 1.4817 and data["batches"] == 8


def test_points_have_their_recipes_and_choices(written):
    arguments = samples.small_report()
    data = written(**arguments).data
    layers, gemms = [layer[0] for layer in data["layers"]], data["gemms"]
    for shown, point in zip(data["points"], arguments["frontier"], strict=True):
        assert joined(data, shown["recipe"]) == point["recipe"]
        assert shown["saving"] == pytest.approx(point["saving"], rel=1e-4)
        chosen = {
            Site(layers[i // len(gemms)], gemms[i % len(gemms)]): data["candidates"][ord(letter) - ord("a")]["label"]
            for i, letter in enumerate(shown["chosen"])
            if letter != "."
        }
        assert chosen == point["chosen"]
    assert data["found"] == 14


def test_a_recipe_that_is_not_on_the_frontier_is_put_there(written):
    arguments = samples.small_report()
    between = {**arguments["frontier"][3], "saving": 0.5, "recipe": "mxfp8; head: hp"}
    data = written(sensitivity=arguments["sensitivity"], frontier=arguments["frontier"], found=between).data
    assert len(data["points"]) == 21 and joined(data, data["points"][data["found"]]["recipe"]) == "mxfp8; head: hp"
    savings = [point["saving"] for point in data["points"]]
    assert savings == sorted(savings)


def test_verified_recipes_are_found_on_the_frontier(written):
    arguments = samples.small_report()
    page = written(**arguments)
    rows = {row["label"]: row for row in page.data["verified"]["rows"]}
    assert rows["found"]["point"] == 14 and rows["nvfp4"]["point"] == 19 and rows["mxfp8"]["saving"] == 0
    for label, row in rows.items():
        if label != "high precision":
            gap = arguments["verification"].gap(label)
            assert row["gap"] == [short(gap.mean), short(gap.low), short(gap.high)]
            assert len(row["curve"]) == 60
    assert "GROWS" in rows["nvfp4"]["growth"] and rows["found"]["verdict"] == "not above the tolerance"
    assert "The recipe that the search chose saves" in page.source and "not above the tolerance." in page.source


def test_recipes_are_found_by_what_they_mean_however_they_are_written(written):
    result = samples.sensitivity()
    points = samples.frontier(result, 20)
    everywhere = ", ".join(f"{gemm}: {text}" for gemm, text in samples.FORMATS["nvfp4"].items())
    recipes = {
        "all": everywhere,
        "rule": f"hp; blocks.*|head: {everywhere}",
        "base": "hp; blocks.*|head: mxfp8",
        "other": f"{everywhere}; head: fprop: mxfp4",
        "phases": f"{everywhere}; last 10 % of steps: hp",
        "blocks": f"{everywhere}; last 1 block: hp",
    }
    runs = samples.verification({})
    runs.recipes = recipes
    runs.runs += [BranchRun(label, seed, losses=[1.0] * 60) for label in recipes for seed in range(3)]
    rows = {
        row["label"]: row
        for row in written(sensitivity=result, frontier=points, verification=runs).data["verified"]["rows"]
    }
    assert rows["all"]["point"] == rows["rule"]["point"] == 19 and rows["base"]["saving"] == 0 == rows["base"]["point"]
    assert not any("point" in rows[label] or "saving" in rows[label] for label in ("other", "phases", "blocks"))


def test_what_diverged_has_no_gap(written):
    rows = {row["label"]: row for row in written(**samples.large_report()).data["verified"]["rows"]}
    assert rows["mxfp4"]["diverged"] == {"1": 18} and "gap" not in rows["mxfp4"] and "loss" not in rows["mxfp4"]
    assert "saving" not in rows["all nvfp4"]  # it is not on the frontier


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"chosen": {Site("nowhere", "fprop"): "nvfp4"}}, "chooses 'nvfp4' for nowhere fprop, which was not measured"),
        ({"chosen": {0: "nvfp5"}}, "chooses 'nvfp5' for 0, which was not measured"),
    ],
)
def test_points_about_what_was_not_measured_are_refused(changed, message, tmp_path):
    result = samples.sensitivity()
    with pytest.raises(ValueError, match=re.escape(message)):
        write_report(tmp_path / "r.html", result, frontier=[{**samples.frontier(result, 2)[0], **changed}])


def test_a_point_needs_its_fields(tmp_path):
    with pytest.raises(ValueError, match="there is no predicted"):
        write_report(tmp_path / "r.html", samples.sensitivity(), frontier=[{"saving": 1.0}])


@pytest.mark.parametrize(
    "changed, message",
    [({"layer": "nowhere"}, "a distribution of nowhere"), ({"colour": 1}, "not a distribution: .*colour")],
)
def test_distributions_of_other_layers_are_refused(changed, message, tmp_path):
    one = samples.distributions(samples.SMALL)[0]
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path / "r.html", samples.sensitivity(), distributions=[{**one, **changed}])


def test_points_may_be_objects_with_estimates(written):
    result = samples.sensitivity()
    mapping = samples.frontier(result, 3)[1]
    point = SimpleNamespace(**{**mapping, "predicted": Estimate(*mapping["predicted"], 8)})
    assert written(sensitivity=result, frontier=[point]).data == written(sensitivity=result, frontier=[mapping]).data
