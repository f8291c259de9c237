"""Results as files."""

import json
import math

import pytest

from crossgrain.lab import Sensitivity
from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Effect, LayerInfo, Site


def made():
    return Sensitivity(
        base="mxfp8",
        candidates={"mxfp8": {"fprop": "mxfp8"}, "nvfp4": {"fprop": "nvfp4"}},
        layers={"a": LayerInfo("linear", 32, 64, 128, group="a")},
        effects={
            Site("a", "fprop"): {"nvfp4": Effect(loss=Estimate(0.1, -math.inf, math.inf, 1))},
            Site("a", "wgrad"): {"nvfp4": Effect(noise=Estimate(0.2, 0.1, 0.3, 8), bias=Estimate(0.01, 0, 0.02, 8))},
        },
        batches=8,
        loss=2.5,
        gradient_variance=3.0,
        left_out={"head": "because"},
        notes=["a note"],
    )


def test_a_file_gives_back_the_result(tmp_path):
    path = tmp_path / "s.json"
    made().save(path)
    assert Sensitivity.load(path) == made()
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN and no Infinity, which JSON does not have


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "s.json"
    for text in ("{", "{}", '{"version": 99}', '{"version": 1}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="s.json"):
            Sensitivity.load(path)


def test_sites_come_in_the_order_of_layers_and_gemms():
    assert [str(site) for site in made().sites()] == ["a fprop", "a wgrad"]
    with pytest.raises(KeyError):
        made().effect("a", "dgrad", "nvfp4")


def test_only_some_candidates_and_the_base():
    s = made()
    s.candidates["mxfp4"] = {"fprop": "mxfp4"}
    s.effects[Site("a", "fprop")]["mxfp4"] = Effect(loss=Estimate(0.3, 0.2, 0.4, 8))
    kept = s.only(["mxfp4"])
    assert list(kept.candidates) == ["mxfp8", "mxfp4"] and list(kept.effects[Site("a", "fprop")]) == ["mxfp4"]
    assert "nvfp4" in s.candidates and kept.loss == s.loss  # the whole is as it was
    with pytest.raises(KeyError):
        s.only(["nvfp5"])
