"""The numbers of `sensitivity` against plain computations site by site."""

import pytest
import torch
import torch.utils.checkpoint

import crossgrain as cg
from crossgrain import GemmRecipe
from crossgrain.lab import sensitivity
from crossgrain.lab.sensitivity.labels import Labels

from .small import NEAREST, batches, errors_of, loss_fn, only, pairs, small, trained, unit


@pytest.fixture(scope="module")
def measured():
    model, optimizer = trained()
    options = {"optimizer": optimizer, "include": "out", "count": 3}
    s = sensitivity(model, batches(), loss_fn, base="mxfp8", candidates=[NEAREST], **options)
    return model, optimizer, s


def test_all_sites_are_there_with_base_and_candidates(measured):
    _, _, s = measured
    assert [str(site) for site in s.sites()] == [
        f"{layer} {gemm}" for layer in ("up", "down", "out") for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert all(set(effects) == {"mxfp8", NEAREST} for effects in s.effects.values())
    assert s.batches == 3 and not s.notes and not s.left_out and not s.interrupted
    assert s.layers["up"].inputs == 32 and s.layers["up"].outputs == 64 and s.layers["up"].tokens == 64
    assert s.loss == pytest.approx(sum(loss_fn(measured[0], b).item() for b in batches()) / 3)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_wgrad_is_that_of_a_converted_layer(measured, layer):
    model, optimizer, s = measured
    errors, exact = errors_of(model, optimizer, only(layer, "wgrad"))
    effect = s.effect(layer, "wgrad", NEAREST)
    noise = [float(e @ e) / unit(exact) for e in errors]
    # The unit is known to about 1 %, because it comes from sketches; noise itself is exact.
    assert effect.noise.mean == pytest.approx(sum(noise) / 3, rel=0.03)
    assert effect.noise.mean * s.gradient_variance == pytest.approx(sum(noise) / 3 * unit(exact), rel=1e-4)
    assert effect.bias.mean == pytest.approx(pairs(errors) / unit(exact), abs=0.03 * effect.noise.mean)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_dgrad_is_that_of_a_converted_layer(measured, layer):
    model, optimizer, s = measured
    errors, exact = errors_of(model, optimizer, only(layer, "dgrad"))
    effect = s.effect(layer, "dgrad", NEAREST)
    noise = sum(float(e @ e) for e in errors) / 3
    assert effect.noise.mean * s.gradient_variance == pytest.approx(noise, rel=1e-4)
    assert effect.bias.mean == pytest.approx(pairs(errors) / unit(exact), abs=0.03 * effect.noise.mean)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_fprop_is_the_fisher_form_of_the_error_of_the_layer(measured, layer):
    model, _, s = measured
    expected = []
    for at, batch in enumerate(batches()):
        seen = {}
        module = model.get_submodule(layer)

        def look(module, inputs, y, seen=seen):
            seen["x"] = inputs[0].detach()
            y.register_hook(lambda dy: seen.update(dy=dy))

        hook = module.register_forward_hook(look)
        with Labels(at):
            loss_fn(model, batch).backward()
        hook.remove()
        x, w = (cg.quantize(each.detach(), NEAREST).dequantize() for each in (seen["x"], module.weight))
        error = x @ w.T - seen["x"] @ module.weight.detach().T
        expected.append(64 / 2 * float((error * seen["dy"]).sum(1).double().square().sum()))
    model.zero_grad()
    assert s.effect(layer, "fprop", NEAREST).loss.mean == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_fprop_predicts_the_measured_loss(measured):
    model, _, s = measured
    more = batches(40)[3:]  # the quadratic form is an expectation: many batches, so that chance does not decide
    with torch.no_grad():
        exact = sum(float(loss_fn(model, b)) for b in more) / len(more)
        predicted, found = 0.0, 0.0
        for layer in s.layers:
            cg.convert(model, only(layer, "fprop"), include="out")
            found += sum(float(loss_fn(model, b)) for b in more) / len(more) - exact
            cg.unconvert(model)
            predicted += s.effect(layer, "fprop", NEAREST).loss.mean
    assert 0.5 < predicted / found < 2


def test_first_and_second_order_are_the_change_of_the_loss_of_these_batches(measured):
    model, _, s = measured
    for layer in s.layers:
        with torch.no_grad():
            exact = [float(loss_fn(model, batch)) for batch in batches()]
            cg.convert(model, only(layer, "fprop"), include="out")
            found = [float(loss_fn(model, batch)) for batch in batches()]
            cg.unconvert(model)
        effect, change = s.effect(layer, "fprop", NEAREST), (sum(found) - sum(exact)) / 3
        # Higher orders, and one draw of labels for each of 192 tokens, are left out.
        assert effect.first.mean + effect.loss.mean == pytest.approx(change, rel=0.1, abs=0.5 * effect.loss.mean)


def test_what_is_in_high_precision_has_no_effect():
    s = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["fprop: nvfp4, dgrad: hp, wgrad: mxfp8"])
    for site in s.sites():
        exact = s.effects[site]["hp"]
        assert all(value.mean == 0 and value.count == 3 for value in vars(exact).values() if value is not None)
    dgrad = s.effect("up", "dgrad", "fprop: nvfp4, dgrad: hp, wgrad: mxfp8")
    assert dgrad.noise.mean == dgrad.bias.mean == 0


def test_layers_that_stay_in_high_precision_by_default_are_named():
    s = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["mxfp8"], skip="down")
    assert set(s.layers) == {"up", "out"} and set(s.left_out) == {"down"}


def test_groups_share_one_dgrad():
    model, optimizer = trained()
    s = sensitivity(
        model, batches(), loss_fn, base="hp", candidates=[NEAREST], optimizer=optimizer, groups=lambda layer: "all"
    )
    errors, _ = errors_of(model, optimizer, GemmRecipe("hp", NEAREST, "hp"))
    total = sum(s.effect(layer, "dgrad", NEAREST).noise.mean for layer in s.layers)
    assert total * s.gradient_variance == pytest.approx(sum(float(e @ e) for e in errors) / 3, rel=1e-4)
    assert {info.group for info in s.layers.values()} == {"all"}
