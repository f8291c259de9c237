"""Nats per unit of noise, from paired runs."""

import pytest

from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Effect, LayerInfo, Sensitivity, Site
from crossgrain.lab.sensitivity.calibration import calibrate


def made(noise=0.25):
    value = Effect(noise=Estimate(noise, noise, noise, 8), bias=Estimate(0, 0, 0, 8))
    effects = {Site(layer, gemm): {"nvfp4(sr)": value} for layer in "ab" for gemm in ("dgrad", "wgrad")}
    formats = {"fprop": "nvfp4", "dgrad": "nvfp4(sr)", "wgrad": "nvfp4(sr)"}
    layers = {layer: LayerInfo("linear", 8, 8, 8) for layer in "ab"}
    return Sensitivity("mxfp8", {"mxfp8": {}, "nvfp4(sr)": formats}, layers, effects)


def branch(recipe, seed):
    gap = 0.0 if recipe is None else {"hp": -0.3, "nvfp4(sr)": 0.1}[str(recipe.dgrad)]
    for step in range(10):
        yield 2.0 + seed + 0.01 * step + gap


def test_the_gap_is_divided_by_the_noise_of_all_layers_and_is_not_below_0():
    s = made()
    result = calibrate(s, branch, seeds=2, steps=10)
    assert s.calibration == {"dgrad": pytest.approx(0.1 / 0.5), "wgrad": 0.0}
    assert list(result.recipes) == ["dgrad: nvfp4(sr)", "wgrad: nvfp4(sr)"]


def test_mistakes():
    with pytest.raises(ValueError, match="'mxfp4' was not measured; there are mxfp8, nvfp4"):
        calibrate(made(), branch, candidate="mxfp4")
    with pytest.raises(ValueError, match="quantizes no backward GEMM"):
        calibrate(made(noise=0.0), branch)


def test_a_run_that_diverges_has_no_price():
    def diverging(recipe, seed):
        for step, loss in enumerate(branch(recipe, seed)):
            yield float("nan") if recipe is not None and str(recipe.dgrad) != "hp" and seed == 1 and step == 3 else loss

    s = made()
    with pytest.raises(ValueError, match="diverged at step 4 of seed 1, so its noise has no price"):
        calibrate(s, diverging, seeds=2, steps=10)
