"""Recipes and helpers for tests of every module: one step, and what must hold of it whatever the module."""

import torch

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import zoo

from .families import PLAIN, make_hybrid_recipe, make_recipe

FAMILIES = [name for name in PLAIN if name != "identity"]

_FACTORIES = [
    zoo.high_precision_fwd_mxfp8_bwd_factory,
    zoo.mxfp8_fwd_nvfp4_bwd_factory,
    zoo.nvfp4_1d_weight_factory,
    zoo.mxfp8_fwd_high_precision_bwd_factory,
    zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory,
    zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory,
]
HYBRIDS = {factory.__name__.removesuffix("_factory"): recipes.CustomRecipe(qfactory=factory) for factory in _FACTORIES}
HYBRIDS |= {
    line: recipes.as_recipe(line)
    for line in (
        "mxfp8-fwd-nvfp4-bwd",
        "nvfp4-fwd-mxfp8-bwd",
        "fprop: fp8, dgrad: fp8_block, wgrad: nvfp4(rht, sr)",
        "fprop: mxfp4, dgrad: hp, wgrad: fp8(delayed)",
    )
}


def recipe_named(name):
    return make_recipe(name) if name in PLAIN else HYBRIDS[name]


def tolerance(name, layers):
    """For the relative error of a sum of products, against fp32.

    Rounding to 3 bits of mantissa errs by up to 1/16, a root mean square of 0.036; to E5M2 by twice, to E2M1
    by four times that. A product has two operands, √2 of that, and every layer on the way adds as much again.
    """
    four_bits = "fp4" in name
    return (0.2 if four_bits else 0.1) * (layers + 1)


def step(module, x, recipe=None, dy=None, **options):
    """Results of forward and backward by name; gradients are taken off the module."""
    x = x.detach().clone().requires_grad_()
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **options)
    y.backward(torch.ones_like(y) if dy is None else dy)
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in module.named_parameters():
        found[f"d {name}"], parameter.grad = parameter.grad, None
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, mine in a.items():
        assert (mine is None) == (b[name] is None), name
        assert mine is None or torch.equal(mine, b[name]), f"{name} differs"


def assert_near(a, exact, limit):
    assert a.keys() == exact.keys()
    for name, mine in a.items():
        assert mine.isfinite().all(), name
        error = (mine - exact[name]).norm() / exact[name].norm()
        assert error < limit, f"{name}: {error}"


def check_near_high_precision(module, x, dy, name, layers, **options):
    """Two steps, so that delayed scaling has seen something; the second is near fp32."""
    exact = step(module, x, None, dy, **options)
    recipe = recipe_named(name)
    for _ in range(2):
        quantized = step(module, x, recipe, dy, **options)
    assert_near(quantized, exact, tolerance(name, layers))
    assert any(not torch.equal(quantized[key], exact[key]) for key in exact)


def check_hybrid_is_plain(make, inputs, family, **options):
    """hybrid(F, F) is bitwise F over three steps. ``make()`` a module, ``inputs()`` x and dy."""
    results = []
    for recipe in (make_recipe(family), make_hybrid_recipe(family)):
        torch.manual_seed(3)
        module = make()
        results.append([step(module, *with_recipe(inputs(), recipe), **options) for _ in range(3)])
    for plain, hybrid in zip(*results, strict=True):
        assert_same(plain, hybrid)


def with_recipe(x_dy, recipe):
    x, dy = x_dy
    return x, recipe, dy


def _train(make, inputs, recipe, validate, **options):
    """Three steps of gradient descent on weights that are kept quantized, perhaps with validation in between."""
    torch.manual_seed(5)
    with cg.quantized_model_init(recipe=recipe):
        module = make()
    data = [inputs() for _ in range(3)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for at, (x, dy) in enumerate(data):
        if validate:
            state = torch.get_rng_state()
            for inference in (torch.no_grad, torch.inference_mode):
                with inference(), cg.autocast(recipe=recipe):
                    module(x + 1, **options)
            torch.set_rng_state(state)
        torch.manual_seed(at)
        with cg.autocast(recipe=recipe):
            y = module(x.requires_grad_(), **options)
        y.backward(dy)
        losses += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return losses, module


def check_validation_changes_nothing(make, inputs, recipe, **options):
    """Alternating training and validation trains bitwise as training alone."""
    alone, _ = _train(make, inputs, recipe, validate=False, **options)
    alternating, module = _train(make, inputs, recipe, validate=True, **options)
    for mine, theirs in zip(alone, alternating, strict=True):
        assert torch.equal(mine, theirs)
    return module


def drop_usages_in_inference(monkeypatch):
    """Break what keeps a quantized weight whole: inference takes away the direction that it does not read."""
    from crossgrain.linear import operands

    kept = operands.usable_weight

    def dropping(weight, call, padded, columnwise):
        used = kept(weight, call, padded, columnwise)
        if not columnwise:
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        return used

    monkeypatch.setattr(operands, "usable_weight", dropping)
