"""Converted models under torch.compile: one graph, the numbers of eager."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain.recipe import CustomRecipe


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model_of(recipe, **options) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 40, bias=False))
    cg.convert(model, recipe, **options)
    return model


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def gradients(run, model, x):
    x = x.detach().clone().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.cos(y.detach()))]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp8",
        "fp8",
        "fp8-block",
        "nvfp4-plain",
        "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)",
        "mxfp8; 3: hp",
        "hp",
        "nvfp4-fwd-hp-bwd",
        "mxfp8, backward_override: dequantized",
        "mxfp8, backward_override: high_precision",
    ],
)
def test_one_graph_computes_what_eager_does(recipe):
    model, x = model_of(recipe), torch.randn(5, 7, 64)
    assert same(gradients(compiled(model), model, x), gradients(model, model, x))


def recomputed_in_a_graph(model):
    def run(x):
        return checkpoint(model, x, use_reentrant=False)

    return torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-fwd-nvfp4-bwd"])
def test_graphs_recompute(recipe):
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)), torch.randn(32, 64)
    cg.convert(model, recipe)
    results = []
    for run in (recomputed_in_a_graph(model), model):
        torch.manual_seed(1)
        results.append(gradients(run, model, x))
    assert same(*results)


def rounded_everywhere(role):
    return cg.NVFP4Quantizer(stochastic_rounding=True)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fp8-delayed", "delayed scaling runs in backward.*compiled function"),
        (CustomRecipe(qfactory=rounded_everywhere), "0 rounds its input or weight stochastically.*compiled"),
    ],
)
def test_graphs_do_not_recompute_other_bits(recipe, message):
    model = model_of(recipe)
    with pytest.raises(RuntimeError, match=message):
        gradients(recomputed_in_a_graph(model), model, torch.randn(32, 64))


def test_delayed_scaling_learns_in_a_graph():
    model = model_of("fp8-delayed")
    other = copy.deepcopy(model)
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(8, 64)
        assert same(gradients(run, model, x), gradients(other, other, x))
        with torch.no_grad():
            run(100 * x)
    state, expected = (m[0].get_extra_state() for m in (model, other))
    assert torch.equal(state["forward.amax_history"], expected["forward.amax_history"])
    assert torch.equal(state["backward.scale"], expected["backward.scale"])


def test_stochastic_rounding_draws_anew_in_every_run():
    model, x = model_of("nvfp4"), torch.randn(32, 64)
    run = compiled(model)
    one, two = gradients(run, model, x), gradients(run, model, x)
    assert torch.equal(one[0], two[0]) and not torch.equal(one[1], two[1])


def test_a_compiled_model_trains():
    model = model_of("mxfp8")
    run, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(16, 64), torch.randn(16, 40)
    losses = []
    for _ in range(5):
        loss = functional.mse_loss(run(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_other_sizes_and_validation_are_traced_anew():
    model = model_of("mxfp8")
    run = compiled(model)
    for rows in (8, 24):
        x = torch.randn(rows, 64)
        assert same(gradients(run, model, x), gradients(model, model, x))
        with torch.no_grad():
            assert torch.equal(run(x), model(x))


def test_frozen_weights_get_no_gradient():
    model, x = model_of("mxfp8"), torch.randn(8, 64)
    model[0].requires_grad_(False)
    compiled(model)(x).sum().backward()
    assert model[0].weight.grad is None and model[3].weight.grad is not None


def test_torch_autocast_decides_the_dtype():
    model, x = model_of("mxfp8"), torch.randn(8, 64)

    def run(values):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model[0](values)

    y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, run(x))


def test_an_autocast_around_the_first_call_decides():
    model, x = model_of("mxfp8"), torch.randn(8, 64)
    run = compiled(model)
    with cg.autocast(recipe="fp8"):
        assert torch.equal(run(x), model(x))
        assert torch.equal(run(x), model(x))
    with pytest.raises(RuntimeError, match="0 was compiled for the recipe .*fp8.* and another one is in force now"):
        run(x)


def test_high_precision_is_a_plain_linear_layer():
    model, x = model_of("mxfp8"), torch.randn(8, 64)
    with cg.autocast(enabled=False):
        torch.testing.assert_close(compiled(model)(x), model(x))


def test_what_is_no_plain_layer_breaks_the_graph_and_computes_the_same():
    layer = cg.Linear(64, 32, delay_wgrad_compute=True)
    layer.bound_recipe = cg.recipe.as_recipe("mxfp8")
    x = torch.randn(8, 64)
    y = torch.compile(layer, backend="aot_eager")(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert layer.weight.grad is None
    layer.backward_dw()
    assert layer.weight.grad is not None


def test_graphs_do_not_keep_models():
    model = model_of("mxfp8")
    compiled(model)(torch.randn(8, 64)).sum().backward()
    gone = weakref.ref(model[0])
    torch.compiler.reset()
    del model
    gc.collect()
    assert gone() is None
