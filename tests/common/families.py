"""Recipes for parametrized tests, each with the factory that says the same, and helpers to run a layer."""

from typing import NamedTuple

import torch
from torch import nn

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import factories

PLAIN = {
    "fp8_current": (recipes.Float8CurrentScaling, factories.current_scaling_factory),
    "fp8_delayed": (lambda: recipes.DelayedScaling(amax_history_len=4), None),
    "mxfp8": (recipes.MXFP8BlockScaling, factories.mxfp8_factory),
    "fp8_block": (recipes.Float8BlockScaling, factories.float8_block_scaling_factory),
    "nvfp4": (recipes.NVFP4BlockScaling, factories.nvfp4_factory),
    "identity": (
        lambda: recipes.CustomRecipe(qfactory=factories.high_precision_factory),
        factories.high_precision_factory,
    ),
}


def delayed_request(role):
    return cg.DelayedScalingRequest(amax_history_len=4)


def hybrid_of(factory):
    """hybrid(F, F) for every slot."""
    return lambda role: cg.HybridQuantizer(rowwise_quantizer=factory(role), columnwise_quantizer=factory(role))


def make_recipe(family):
    return PLAIN[family][0]()


def make_hybrid_recipe(family):
    return recipes.CustomRecipe(qfactory=hybrid_of(PLAIN[family][1] or delayed_request))


def without_randomness(recipe):
    return recipes.NVFP4BlockScaling(disable_stochastic_rounding=True) if recipe.nvfp4() else recipe


class Step(NamedTuple):
    y: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None


def run(layer, x, recipe, dy=None, **options):
    """One forward and backward pass; gradients are taken off the layer."""
    x = x.detach().clone().requires_grad_(x.requires_grad or not x.is_leaf)
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **options)
    y.backward(torch.ones_like(y) if dy is None else dy)
    weights = [getattr(layer, name) for name in layer.weight_names]
    step = Step(y.detach(), x.grad, weights[0].grad, None if layer.bias is None else layer.bias.grad)
    for parameter in layer.parameters():
        parameter.grad = None
    return step


def assert_same_step(a, b):
    for name in Step._fields:
        mine, theirs = getattr(a, name), getattr(b, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), f"{name} differs"


def sizes(m=32, k=64, n=96, dtype=torch.float32):
    """x that wants a gradient, and dy."""
    return torch.randn(m, k, dtype=dtype).requires_grad_(), torch.randn(m, n, dtype=dtype)


def reference(layer, x, dy):
    """The same step in torch, in high precision."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.use_bias, dtype=x.dtype)
    with torch.no_grad():
        plain.weight.copy_(layer.weight.dequantize() if isinstance(layer.weight, cg.QuantizedTensor) else layer.weight)
        if layer.use_bias:
            plain.bias.copy_(layer.bias)
    x = x.detach().clone().requires_grad_()
    y = plain(x)
    y.backward(dy)
    return Step(y.detach(), x.grad, plain.weight.grad, plain.bias.grad if layer.use_bias else None)
