"""Attention and transformer layers under every recipe: hybrid equals plain, formats mix, validation is harmless."""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import zoo

from ...common.families import PLAIN, delayed_request, hybrid_of, make_hybrid_recipe, make_recipe

MIXED = {
    "hp_fwd_mxfp8_bwd": zoo.high_precision_fwd_mxfp8_bwd_factory,
    "mxfp8_fwd_nvfp4_bwd": zoo.mxfp8_fwd_nvfp4_bwd_factory,
    "nvfp4_1d_weight": zoo.nvfp4_1d_weight_factory,
    "mxfp8_fwd_hp_bwd": zoo.mxfp8_fwd_high_precision_bwd_factory,
    "nvfp4_fwd_hp_bwd": zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory,
    "nvfp4_linear_fp8_dpa": zoo.nvfp4_linear_fp8_dpa_factory,
    "three": "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: fp8, attention: mxfp8",
    "attention": "all: fp8, attention: nvfp4(sr), attention.s: fp8, attention.dqkv: hp",
}

MODULES = {
    "attention": lambda: cg.MultiheadAttention(
        32, 4, num_gqa_groups=2, attention_dropout=0.0, fuse_qkv_params=True, input_layernorm=True
    ),
    "cross": lambda: cg.MultiheadAttention(
        32, 4, attention_dropout=0.0, fuse_qkv_params=True, attention_type="cross", attn_mask_type="no_mask"
    ),
    "encoder": lambda: cg.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, activation="swiglu"
    ),
    "decoder": lambda: cg.TransformerLayer(
        32,
        64,
        4,
        num_gqa_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        layer_type="decoder",
        normalization="RMSNorm",
    ),
}


def mixed_recipe(name):
    choice = MIXED[name]
    return choice if isinstance(choice, str) else recipes.CustomRecipe(qfactory=choice, fp8_dpa="dpa" in name)


def step(module, recipe, seed, name):
    """Output and all gradients of one pass."""
    torch.manual_seed(seed)
    x = torch.randn(8, 2, 32).requires_grad_()
    options = {"encoder_output": torch.randn(12, 2, 32)} if name in ("cross", "decoder") else {}
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **options)
    y.backward(torch.randn_like(y))
    results = [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return results


def assert_same(a, b):
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("attention", [False, True], ids=["", "attention"])
@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("name", MODULES)
def test_hybrid_of_one_format_is_bitwise_that_format(name, family, attention):
    """Over two steps, with rotation, stochastic rounding and histories."""
    factory = PLAIN[family][1] or delayed_request
    pair = [make_recipe(family), make_hybrid_recipe(family)]
    if attention:  # factories on both sides: to most of them the gradients of attention are as good as inputs
        pair = [recipes.CustomRecipe(qfactory=made, fp8_mha=True) for made in (factory, hybrid_of(factory))]
    torch.manual_seed(0)
    module, results = MODULES[name](), []
    for recipe in pair:
        one = copy.deepcopy(module)
        results.append([step(one, recipe, seed, name) for seed in range(2)])
    for plain, hybrid in zip(*results, strict=True):
        assert all(torch.isfinite(result).all() for result in plain)
        assert_same(plain, hybrid)


@pytest.mark.parametrize("recipe", MIXED)
@pytest.mark.parametrize("name", MODULES)
def test_mixed_formats(name, recipe):
    torch.manual_seed(0)
    module = MODULES[name]()
    exact = step(module, None, 1, name)
    for _ in range(2):
        mine = step(module, mixed_recipe(recipe), 1, name)
    assert all(torch.isfinite(result).all() for result in mine)
    assert not torch.equal(mine[1], exact[1])
    assert (mine[0] - exact[0]).norm() < 0.5 * exact[0].norm()
    assert (mine[1] - exact[1]).norm() < 0.6 * exact[1].norm()


TRAINING = ["mxfp8", "nvfp4", "fp8_delayed", "fp8_current", *MIXED]


@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize("name", ["attention", "encoder", "decoder"])
def test_validation_between_steps_changes_nothing(name, recipe):
    """Weights are kept quantized; both trainings end in the same bytes, losses and histories."""
    ends = []
    for validates in (False, True):
        torch.manual_seed(0)
        chosen = mixed_recipe(recipe) if recipe in MIXED else make_recipe(recipe)
        if recipe not in MIXED:
            chosen.fp8_mha = True
        with cg.quantized_model_init(recipe=chosen):
            module = MODULES[name]()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        outputs = []
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(8, 2, 32)
            options = {"encoder_output": torch.randn(12, 2, 32)} if name == "decoder" else {}
            if validates:
                with torch.random.fork_rng(), torch.no_grad(), cg.autocast(recipe=chosen):
                    module(x * 3, **options)
            with cg.autocast(recipe=chosen):
                y = module(x, **options)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
        ends.append([*outputs, *(_values(parameter) for parameter in module.parameters())])
    assert_same(*ends)


def _values(parameter):
    return parameter.dequantize() if isinstance(parameter, cg.QuantizedTensor) else parameter.detach()
