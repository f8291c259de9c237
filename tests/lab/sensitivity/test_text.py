"""The table of a sensitivity."""

from crossgrain.lab import sensitivity
from crossgrain.lab.intervals import Estimate
from crossgrain.lab.sensitivity import Effect, LayerInfo, Sensitivity, Site
from crossgrain.lab.sensitivity.text import table

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


def test_a_narrow_table_leaves_out_intervals_of_the_bias_and_then_all_of_them():
    estimate = Estimate(0.001, 0.0005, 0.0015, 8)
    effects = {
        Site("up", "fprop"): {"x": Effect(loss=estimate)},
        **{Site("up", gemm): {"x": Effect(noise=estimate, bias=estimate)} for gemm in ("dgrad", "wgrad")},
    }
    layers = {"up": LayerInfo("linear", 8, 8, 8)}
    s = Sensitivity("x", {"x": {"fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "nvfp4"}}, layers, effects)

    def row(width):
        (line,) = [line for line in table(s, width).splitlines() if line.startswith("up ")]
        return line

    assert row(None) == row(200) and row(None).count("±") == 3
    widest, middle = len(row(None)), len(row(len(row(None)) - 1))
    assert row(widest).count("±") == 3 and row(widest - 1).count("±") == 1 and row(middle - 1).count("±") == 0
