"""The table of a sensitivity."""

from crossgrain.lab import sensitivity
from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Effect, LayerInfo, Sensitivity, Site

from .small import batches, loss_fn, small


def test_a_table_has_every_layer_its_sums_and_all_notes():
    s = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["nvfp4"], groups="kind", skip="down")
    text = str(s)
    assert "nvfp4 (fprop: nvfp4, dgrad: nvfp4, wgrad: nvfp4)" in text and "hp, the base" in text
    assert "only 3 batches instead of 8" in text and "down: " in text and "no optimizer was given" in text
    effect = s.effect("up", "fprop", "nvfp4").loss
    row = next(line for line in text.split("nvfp4 (")[1].splitlines() if line.startswith("up "))
    assert f"{1000 * effect.mean:.3f} ± {1000 * effect.half_width:.3f}" in row
    total = sum(s.effect(layer, "fprop", "nvfp4").loss.mean for layer in s.layers)
    sums = next(line for line in text.split("nvfp4 (")[1].splitlines() if line.startswith("sum"))
    assert sums.split()[4] == f"{1000 * total:.3f}"


def test_a_long_table_shows_the_most_sensitive_layers_and_how_many_are_left():
    layers = {f"layers.{at}": LayerInfo("linear", 8, 8, 8) for at in range(100)}
    effects = {Site(name, "fprop"): {"x": Effect(loss=Estimate(at, at, at, 8))} for at, name in enumerate(layers)}
    s = Sensitivity("b", {"x": {"fprop": "nvfp4"}, "b": {"fprop": "hp"}}, layers, effects, interrupted=True)
    text = str(s)
    assert "layers.99 " in text and "layers.0 " not in text and "and 60 layers that are less sensitive" in text
    assert "b, the base: not measured" in text and "(stopped early)" in text
