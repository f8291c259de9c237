"""Converted models and modules under torch.compile: one graph, the numbers of eager."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain.recipe import CustomRecipe, read_extra_state


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
    state, expected = (read_extra_state(m[0].get_extra_state()) for m in (model, other))
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
    with pytest.raises(RuntimeError, match="0 was compiled for the recipe .*fp8.*, but the current recipe is"):
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


# ---- other modules ---------------------------------------------------------------------------------------

MODULES = {
    "LayerNormLinear": lambda: cg.LayerNormLinear(64, 96, return_bias=True, return_layernorm_output=True),
    "LayerNormLinear of parts": lambda: cg.LayerNormLinear(
        64, 96, parameters_split={"a": 32, "b": 64}, normalization="RMSNorm", zero_centered_gamma=True
    ),
    "LayerNormMLP": lambda: cg.LayerNormMLP(64, 96, activation="swiglu"),
    "GroupedLinear": lambda: cg.GroupedLinear(3, 64, 40),
    "GroupedLinear of one weight": lambda: cg.GroupedLinear(
        3, 64, 40, single_grouped_weight=True, single_grouped_bias=True
    ),
    "MultiheadAttention": lambda: cg.MultiheadAttention(64, 4, attention_dropout=0.0, input_layernorm=True),
    "TransformerLayer": lambda: cg.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0),
}


def module_of(name, recipe="mxfp8"):
    torch.manual_seed(1)
    module = MODULES[name]()
    for part in module.modules():
        if isinstance(part, cg.nn.QuantizedModule):
            part.bound_recipe = cg.recipe.as_recipe(recipe)
    return module


def run_of(run, name):
    """Of one input, to one output."""
    sizes = ([8, 0, 20],) if name.startswith("GroupedLinear") else ()

    def call(x):
        y = run(x, *sizes)
        return torch.cat([part.expand(*x.shape[:-1], -1) for part in y], dim=-1) if isinstance(y, tuple) else y

    return call


@pytest.mark.parametrize(
    "name, recipe",
    [*((name, "mxfp8") for name in MODULES), ("LayerNormMLP", "fp8-delayed"), ("GroupedLinear", "nvfp4-plain")],
)
def test_a_module_is_one_graph_that_computes_what_eager_does(name, recipe):
    module, other = module_of(name, recipe), module_of(name, recipe)
    run, expected = run_of(compiled(module), name), run_of(other, name)
    for _ in range(2):  # the second time with learned scales
        x = torch.randn(7, 4, 64)
        assert same(gradients(run, module, x), gradients(expected, other, x))
    with torch.no_grad():
        assert torch.equal(run(x), expected(x))


@pytest.mark.parametrize("unfused", ["0", "1"])
def test_delayed_scaling_of_several_layers_learns_in_a_graph(unfused, monkeypatch):
    """Forward is one step: by the unfused rule, histories roll once."""
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    module, other = (module_of("LayerNormMLP", "fp8-delayed") for _ in range(2))
    run = compiled(module)
    for _ in range(3):
        x = torch.randn(8, 64)
        gradients(run, module, x), gradients(other, other, x)
    states = [read_extra_state(m.get_extra_state()) for m in (module, other)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]) if isinstance(value, torch.Tensor) else value == states[1][key]


def test_a_module_in_an_autocast():
    module = MODULES["LayerNormMLP"]()
    run, x = compiled(module), torch.randn(8, 64)
    with cg.autocast(recipe="fp8"):
        assert torch.equal(run(x), module(x))
    with pytest.raises(RuntimeError, match="was compiled for the recipe .*fp8.*, but the current recipe is"):
        run(x)


UNTRACED = {
    "a module that computes again": lambda: cg.LayerNormMLP(64, 64, checkpoint=True),
    "delayed gradients": lambda: cg.LayerNormLinear(64, 64, delay_wgrad_compute=True),
    "quantized attention": lambda: cg.DotProductAttention(4, 16, attention_dropout=0.0),
    "fusible operations": lambda: cg.ops.Sequential(cg.ops.Linear(64, 64), cg.ops.GELU()),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_what_cannot_be_traced_runs_in_eager_and_says_so_if_it_may_not(name):
    torch.manual_seed(1)
    module = UNTRACED[name]()
    recipe = cg.recipe.DelayedScaling(fp8_dpa=True) if "attention" in name else cg.recipe.as_recipe("mxfp8")
    inputs = (torch.randn(8, 2, 4, 16),) * 3 if "attention" in name else (torch.randn(8, 64),)
    with cg.autocast(recipe=recipe):
        expected = copy.deepcopy(module)(*inputs)
        torch.compiler.reset()
        assert torch.equal(torch.compile(copy.deepcopy(module), backend="aot_eager")(*inputs), expected)
        torch.compiler.reset()
        with pytest.raises(Exception, match="crossgrain: .* in eager"):
            compiled(module)(*inputs)


def test_sizes_of_groups_in_a_tensor_run_in_eager():
    module, x = module_of("GroupedLinear"), torch.randn(28, 64)
    sizes = torch.tensor([8, 0, 20])
    assert torch.equal(torch.compile(module, backend="aot_eager")(x, sizes), module(x, sizes))


def test_graphs_do_not_keep_models():
    model = model_of("mxfp8")
    compiled(model)(torch.randn(8, 64)).sum().backward()
    gone = weakref.ref(model[0])
    torch.compiler.reset()
    del model
    gc.collect()
    assert gone() is None
