"""Operands that are raised to high precision: the bits are those of a recipe that has them in high precision."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.linear.raised import ARRIVES_QUANTIZED, KEPT_QUANTIZED, raising
from crossgrain.nn import DotProductAttention, GroupedLinear, LayerNormMLP, Linear
from crossgrain.recipe import DelayedScaling, GemmRecipe

OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")


def chosen(*wanted):
    return lambda operand: (operand.layer, operand.name) in wanted


def step(module, x, choose=None, recipe=None):
    """Loss, dx and gradients of one step."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    with nullcontext() if choose is None else raising(choose):
        with nullcontext() if recipe is None else cg.autocast(recipe=recipe):
            loss = module(x).square().mean()
        loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def three_layers(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width), nn.GELU(), nn.Linear(width, 32))


def converted(recipe, width=64):
    model = three_layers(width)
    cg.convert(model, recipe, include=["4"])
    return model


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("recipe", ["mxfp8", "fprop: nvfp4, dgrad: nvfp4, wgrad: nvfp4(rht)", "fp8"])
def test_a_raised_operand_gives_the_bits_of_a_rule_for_it(recipe, operand):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    raised = step(converted(recipe), x, chosen(("2", operand)))
    by_rule = step(converted(GemmRecipe.load(f"{recipe}, allow_mixed: true; 2: {operand}: hp")), x)
    assert same(raised, by_rule)
    assert not same(raised, step(converted(recipe), x))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4, wgrad: nvfp4(rht, sr)"])
def test_looking_changes_nothing_and_allow_mixed_neither(recipe):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    plain = step(converted(recipe), x)
    assert same(plain, step(converted(recipe), x, lambda operand: False))
    assert same(plain, step(converted(f"{recipe}, allow_mixed: true"), x))


def test_all_operands_of_a_step_are_shown():
    seen = []
    step(converted("mxfp8"), torch.randn(32, 64), lambda operand: seen.append((operand.layer, operand.name)))
    assert sorted(seen) == sorted((layer, name) for layer in "024" for name in OPERANDS)


def test_all_raised_is_high_precision():
    x = torch.randn(40, 50)  # nothing is a multiple of a block
    raised = step(converted("mxfp8", width=50), x, lambda operand: True)
    plain = step(three_layers(width=50), x)
    for one, other in zip(raised, plain, strict=True):  # other orders of summation, because sizes are padded
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("operand", ["wgrad.input", "dgrad.weight"])
def test_decoded_operands_of_backward_are_raised(operand):
    """With backward_override, backward decodes what forward has multiplied. Sizes are padded."""
    recipe, x = "mxfp8, backward_override: dequantized", torch.randn(40, 50)
    everything = step(converted("all: hp", width=50), x)
    raised = step(converted(recipe, width=50), x, lambda shown: shown.name in ("fprop.input", "fprop.weight", operand))
    both = step(converted(recipe, width=50), x, lambda shown: True)
    assert not same(raised, both)
    for one, other in zip(both, everything, strict=True):  # other orders of summation
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_an_input_that_backward_quantizes_again_is_raised():
    x, made = torch.randn(32, 64), []
    for save_original_input in (False, True):
        torch.manual_seed(0)
        layer = Linear(64, 32, save_original_input=save_original_input, name="fc")
        made.append(step(layer, x, chosen(("fc", "wgrad.input")), recipe="mxfp8"))
    assert same(*made)
    assert not same(made[0], step(layer, x, recipe="mxfp8"))


def test_delayed_scaling_records_and_scales_as_without_raising():
    x, states = torch.randn(32, 64), []
    for choose in (None, chosen(("fc", "fprop.input"), ("fc", "wgrad.grad_output"))):
        torch.manual_seed(0)
        layer = Linear(64, 32, name="fc")
        for scale in (1.0, 3.0):
            losses = step(layer, scale * x, choose, recipe=DelayedScaling(amax_history_len=4))
        forward, _ = layer.get_fp8_meta_tensors().values()
        states.append((forward, losses))
    assert same(states[0][0], states[1][0])
    assert not same(states[0][1], states[1][1])


def test_raising_draws_as_many_seeds():
    x, after = torch.randn(32, 64), []
    for choose in (None, lambda operand: True):
        step(converted("nvfp4(sr)"), x, choose)
        after.append(torch.rand(1))
    assert torch.equal(*after)


def test_a_weight_that_is_kept_quantized_has_no_original():
    seen = {}

    def choose(operand):
        seen[operand.name] = (operand.original is None, operand.reason)
        return True

    with cg.quantized_model_init(recipe="mxfp8"):
        layer = Linear(64, 32, name="fc")
    step(layer, torch.randn(32, 64), choose, recipe="mxfp8")
    unknown = {name: reason for name, (is_unknown, reason) in seen.items() if is_unknown}
    assert unknown == {"fprop.weight": KEPT_QUANTIZED, "dgrad.weight": KEPT_QUANTIZED}


def test_rows_that_arrive_quantized_have_no_original():
    seen = {}

    def choose(operand):
        seen[operand.name] = operand.reason
        return True

    torch.manual_seed(0)
    layer, x = GroupedLinear(2, 32, 32, name="experts"), cg.quantize(torch.randn(64, 32), "mxfp8", columnwise=False)
    recipe = "mxfp8, input.source: dequantized"
    with raising(choose), cg.autocast(recipe=recipe):
        layer(x, [32, 32]).square().mean().backward()
    assert seen["fprop.input"] == seen["wgrad.input"] == ARRIVES_QUANTIZED and seen["fprop.weight"] == ""


def test_the_products_of_one_module_are_layers_of_their_own():
    def made(choose, recipe):
        torch.manual_seed(0)
        return step(LayerNormMLP(32, 64, name="mlp"), torch.randn(32, 32), choose, recipe=recipe)

    raised = made(chosen(("mlp.fc2", "fprop.input")), "mxfp8")
    assert same(raised, made(None, "mxfp8, allow_mixed: true; mlp.fc2: fprop.input: hp"))
    assert not same(raised, made(None, "mxfp8"))


@pytest.mark.parametrize("operand", OPERANDS)
def test_groups_of_rows_are_raised_together(operand):
    x, sizes = torch.randn(96, 32), torch.tensor([32, 0, 64])

    def made(choose, recipe):
        torch.manual_seed(0)
        layer = GroupedLinear(3, 32, 32, name="experts")
        layer.forward = lambda x, forward=layer.forward: forward(x, sizes.tolist())
        return step(layer, x, choose, recipe=recipe)

    raised = made(chosen(("experts", operand)), "mxfp8")
    assert same(raised, made(None, f"mxfp8, allow_mixed: true; experts: {operand}: hp"))
    assert not same(raised, made(None, "mxfp8"))


@pytest.mark.parametrize("tensor", ["qkv", "s", "do", "dp", "o", "dqkv"])
def test_tensors_of_attention_are_raised(tensor):
    def made(choose, recipe):
        torch.manual_seed(3)
        q, k, v = (torch.randn(32, 1, 2, 32, requires_grad=True) for _ in range(3))
        core = DotProductAttention(2, 32, name="core")
        with nullcontext() if choose is None else raising(choose):
            with cg.autocast(recipe=recipe):
                y = core(q, k, v)
            y.sin().sum().backward()
        return [y.detach(), q.grad, k.grad, v.grad]

    low = made(None, "all: hp, attention: fp8")
    raised = made(chosen(("core", f"attention.{tensor}")), "all: hp, attention: fp8")
    assert same(raised, made(None, f"all: hp, attention: fp8, attention.{tensor}: hp"))
    assert not same(raised, low)
