"""LayerNormLinear: the norm and the linear layer it consists of, under every recipe."""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe import MXFP8BlockScaling

from ..common.families import PLAIN, make_hybrid_recipe, make_recipe
from ..common.modules import (
    FAMILIES,
    HYBRIDS,
    assert_same,
    check_hybrid_is_plain,
    check_near_high_precision,
    check_validation_changes_nothing,
    drop_usages_in_inference,
    recipe_named,
    step,
)

NORMS = {"LayerNorm": cg.LayerNorm, "RMSNorm": cg.RMSNorm}


def make(**options):
    layer = cg.LayerNormLinear(64, 96, **options)
    torch.nn.init.normal_(layer.layer_norm_weight, mean=1.0, std=0.2)
    return layer


def inputs():
    return torch.randn(32, 64), torch.randn(32, 96)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("recipe", [None, "fp8_delayed", "mxfp8", "mxfp8-fwd-nvfp4-bwd"])
def test_is_a_norm_and_a_linear_layer(recipe, normalization, zero_centered):
    """Bitwise, gradients included."""
    fused = make(normalization=normalization, zero_centered_gamma=zero_centered)
    norm = NORMS[normalization](64, zero_centered_gamma=zero_centered)
    linear = cg.Linear(64, 96)
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            owner = norm if name.startswith("layer_norm_") else linear
            getattr(owner, name.removeprefix("layer_norm_")).copy_(parameter)
    apart = torch.nn.Sequential(norm, linear)
    x, dy = inputs()
    results = []
    for module in (fused, apart):
        torch.manual_seed(0)
        results.append(list(step(module, x, None if recipe is None else recipe_named(recipe), dy).values()))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_near_high_precision(name):
    check_near_high_precision(make(), *inputs(), name, layers=1)


@pytest.mark.parametrize("family", PLAIN)
def test_hybrid_of_one_format_is_bitwise_that_format(family):
    check_hybrid_is_plain(make, inputs, family)


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_validation_changes_nothing(name):
    layer = check_validation_changes_nothing(make, inputs, recipe_named(name))
    assert layer.primary_weights_in_fp8 and not isinstance(layer.layer_norm_weight, cg.QuantizedTensor)


@pytest.mark.parametrize("hybrid", [False, True])
def test_validation_would_change_something_if_it_dropped_usages(hybrid, monkeypatch):
    drop_usages_in_inference(monkeypatch)
    recipe = make_hybrid_recipe("mxfp8") if hybrid else make_recipe("mxfp8")
    with pytest.raises((AssertionError, RuntimeError)):
        check_validation_changes_nothing(make, inputs, recipe)


def test_results_that_are_asked_for():
    x = torch.randn(4, 64, requires_grad=True)
    exact = torch.nn.functional.layer_norm(x, (64,))
    plain = cg.LayerNormLinear(64, 96)
    y, bias, normed = _with(plain, return_bias=True, return_layernorm_output=True)(x)
    assert bias is plain.bias
    torch.testing.assert_close(normed, exact)
    torch.testing.assert_close(y, exact @ plain.weight.t())
    y, normed = _with(plain, return_layernorm_output=True)(x)
    normed.sum().backward()  # a residual connection may start there
    assert x.grad is not None


def _with(layer, **options):
    """A layer with the same parameters and other results."""
    other = cg.LayerNormLinear(64, 96, **options)
    for name, parameter in layer.named_parameters():
        setattr(other, name, parameter)
    return other


def test_names_as_elsewhere():
    assert list(make().state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert list(make(normalization="RMSNorm", bias=False).state_dict()) == ["layer_norm_weight", "weight"]
    with pytest.raises(ValueError, match="normalization must be one of"):
        make(normalization="BatchNorm")


def test_split_parameters():
    whole = make()
    split = make(parameters_split={"query": 32, "key_value": 64})
    with torch.no_grad():
        for name in ("weight", "bias"):
            for part, rows in zip(("query_", "key_value_"), getattr(whole, name).split([32, 64]), strict=True):
                getattr(split, part + name).copy_(rows)
        split.layer_norm_weight.copy_(whole.layer_norm_weight)
    x, dy = inputs()
    one, other = step(whole, x, MXFP8BlockScaling(), dy), step(split, x, MXFP8BlockScaling(), dy)
    assert torch.equal(one["y"], other["y"]) and torch.equal(one["dx"], other["dx"])
    assert torch.equal(one["d weight"], torch.cat((other["d query_weight"], other["d key_value_weight"])))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_fwd_nvfp4_bwd"])
def test_options_of_a_linear_layer_work_here(name):
    """Main gradients, weight gradients put off, inputs kept, weights cached: all as the plain step."""
    layer = make()
    x, dy = inputs()
    recipe = recipe_named(name)
    torch.manual_seed(0)
    plain = step(layer, x, recipe, dy)

    other = copy.deepcopy(layer)
    other.delay_wgrad_compute, other.save_original_input = True, True
    torch.manual_seed(0)
    step(other, x, recipe, dy, is_first_microbatch=True)
    assert other.need_backward_dw() and list(other._fp8_workspaces) == ["weight"]
    other.backward_dw()
    torch.testing.assert_close(other.weight.grad, plain["d weight"])

    other = copy.deepcopy(layer)
    other.fuse_wgrad_accumulation = True
    other.weight.main_grad = torch.ones(96, 64)
    torch.manual_seed(0)
    fused = step(other, x, recipe, dy)
    assert fused["d weight"] is None
    torch.testing.assert_close(other.weight.main_grad, plain["d weight"] + 1)


def test_histories_are_in_the_state_dict():
    layer = make()
    x, dy = inputs()
    for _ in range(2):
        step(layer, x, make_recipe("fp8_delayed"), dy)
    other = make()
    other.load_state_dict(layer.state_dict())
    assert_same(*(step(module, x, make_recipe("fp8_delayed"), dy) for module in (layer, other)))


def test_meta_device():
    with cg.quantized_model_init(recipe=MXFP8BlockScaling()):
        layer = cg.LayerNormLinear(64, 96, device="meta")
    layer.reset_parameters()
    assert isinstance(layer.weight, cg.MXFP8Tensor) and (layer.layer_norm_weight == 1).all()
    step(layer, inputs()[0], MXFP8BlockScaling())
