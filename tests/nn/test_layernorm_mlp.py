"""LayerNormMLP: the modules it consists of, every activation, every recipe, recomputation."""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe import MXFP8BlockScaling, QuantizerRole, as_recipe, read_extra_state

from ..common.families import PLAIN, make_hybrid_recipe, make_recipe
from ..common.modules import (
    FAMILIES,
    HYBRIDS,
    assert_near,
    assert_same,
    check_hybrid_is_plain,
    check_near_high_precision,
    check_validation_changes_nothing,
    drop_usages_in_inference,
    recipe_named,
    step,
)

PLAIN_ACTIVATIONS = ["gelu", "qgelu", "relu", "srelu", "silu"]
GATED = ["glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"]
ACTIVATIONS = PLAIN_ACTIVATIONS + GATED


def make(**options):
    torch.manual_seed(1)
    mlp = cg.LayerNormMLP(64, 96, init_method=lambda w: torch.nn.init.normal_(w, std=0.3), **options)
    for name, parameter in mlp.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return mlp


def inputs():
    return torch.randn(32, 64), torch.randn(32, 64)


def formula(name, x):
    """As textbooks have it; autograd takes the derivative."""
    f = torch.nn.functional
    if name == "clamped_swiglu":
        gate, rest = x.chunk(2, dim=-1)
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (rest.clamp(-7.0, 7.0) + 1)
    functions = {
        "gelu": lambda t: f.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": f.relu,
        "srelu": lambda t: f.relu(t) ** 2,
        "silu": f.silu,
    }
    gates = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
    if name in functions:
        return functions[name](x)
    gate, rest = x.chunk(2, dim=-1)
    return (torch.sigmoid(gate) if name == "glu" else functions[gates[name]](gate)) * rest


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name):
    mlp = make(activation=name)
    assert mlp.fc1_weight.shape == (192 if name in GATED else 96, 64)

    def textbook(x):
        x = torch.nn.functional.layer_norm(x, (64,), mlp.layer_norm_weight, mlp.layer_norm_bias)
        hidden = formula(name, x @ mlp.fc1_weight.t() + mlp.fc1_bias)
        return hidden @ mlp.fc2_weight.t() + mlp.fc2_bias

    textbook.named_parameters = mlp.named_parameters
    x, dy = inputs()
    mine, theirs = step(mlp, x, None, dy), step(textbook, x, None, dy)
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_quantized(activation, name):
    mlp = make(activation=activation)
    x, dy = inputs()
    assert_near(step(mlp, x, recipe_named(name), dy), step(mlp, x, None, dy), 0.3)


def test_limits_of_an_activation():
    x, _ = inputs()
    free, tight = (make(activation="clamped_swiglu", activation_params={"limit": limit}) for limit in (100.0, 0.1))
    assert not torch.allclose(free(x), tight(x))
    with pytest.raises(ValueError, match="no activation 'tanhglu'"):
        make(activation="tanhglu")


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd"])
def test_is_two_linear_layers(recipe):
    """Bitwise what a norm, a layer, an activation and a layer are."""
    mlp = make(activation="swiglu")
    first, second = cg.LayerNormLinear(64, 192), cg.Linear(96, 64)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            owner = second if name.startswith("fc2_") else first
            getattr(owner, name.removeprefix("fc1_").removeprefix("fc2_")).copy_(parameter)
    apart = torch.nn.Sequential(first, Swiglu(), second)
    x, dy = inputs()
    results = []
    for module in (mlp, apart):
        torch.manual_seed(0)
        results.append(list(step(module, x, recipe_named(recipe), dy).values()))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


class Swiglu(torch.nn.Module):
    def forward(self, x):
        from crossgrain.gemm.activations import activation
        from crossgrain.nn.layernorm_mlp import _ActivationFunction

        return _ActivationFunction.apply(x, activation("swiglu"))


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_near_high_precision(name):
    check_near_high_precision(make(), *inputs(), name, layers=2)


@pytest.mark.parametrize("family", PLAIN)
def test_hybrid_of_one_format_is_bitwise_that_format(family):
    check_hybrid_is_plain(make, inputs, family)


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_validation_changes_nothing(name):
    mlp = check_validation_changes_nothing(make, inputs, recipe_named(name))
    assert all(isinstance(weight, cg.QuantizedTensor) for weight in (mlp.fc1_weight, mlp.fc2_weight))


@pytest.mark.parametrize("hybrid", [False, True])
def test_validation_would_change_something_if_it_dropped_usages(hybrid, monkeypatch):
    drop_usages_in_inference(monkeypatch)
    recipe = make_hybrid_recipe("mxfp8") if hybrid else make_recipe("mxfp8")
    with pytest.raises((AssertionError, RuntimeError)):
        check_validation_changes_nothing(make, inputs, recipe)


# ---- recomputation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_microbatch", [None, True])
@pytest.mark.parametrize("name", [None, *FAMILIES, *HYBRIDS])
def test_recomputation_is_bitwise(name, first_microbatch):
    """Three steps, so that histories would show a recomputation that counts twice or comes too late."""
    results = []
    for checkpoint in (False, True):
        mlp = make(checkpoint=checkpoint)
        recipe = None if name is None else recipe_named(name)
        torch.manual_seed(2)
        steps = [step(mlp, *inputs()[:1], recipe, is_first_microbatch=first_microbatch) for _ in range(3)]
        results.append((steps, mlp.state_dict()))
    (kept, state), (again, state_again) = results
    for mine, theirs in zip(kept, again, strict=True):
        assert_same(mine, theirs)
    assert_same(*(_histories(dictionary) for dictionary in (state, state_again)))


def _histories(state):
    return {name: torch.as_tensor(value) for name, value in read_extra_state(state.get("_extra_state")).items()}


def test_recomputation_keeps_only_the_input():
    kept = []
    for checkpoint in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            make(checkpoint=checkpoint)(inputs()[0].requires_grad_())
        kept.append(sum(tensor.numel() for tensor in saved))
    assert kept[1] <= 32 * 64 < kept[0]


def test_recomputation_may_run_twice():
    mlp = make(checkpoint=True)
    recipe = make_recipe("fp8_delayed")
    x = inputs()[0].requires_grad_()
    with cg.autocast(recipe=recipe):
        y = mlp(x)
    gradients = [torch.autograd.grad(y.sum(), mlp.fc1_weight, retain_graph=True)[0] for _ in range(2)]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_recomputation_without_gradients_and_while_calibrating():
    mlp, x = make(checkpoint=True), inputs()[0]
    with torch.no_grad():
        assert torch.equal(mlp(x), make()(x))
    with cg.autocast(enabled=False, calibrating=True, recipe=make_recipe("fp8_delayed")):
        y = mlp(x.requires_grad_())
    y.sum().backward()
    plain = make()
    plain(x).sum().backward()
    assert torch.equal(mlp.fc1_weight.grad, plain.fc1_weight.grad)


# ---- the rest -----------------------------------------------------------------------------------------


def test_roles_and_slots():
    mlp = cg.LayerNormMLP(64, 96, name="block.mlp")
    mlp.output_quantizer_role = QuantizerRole("dpa", "qkv", "next")
    forward = mlp.get_quantizer_roles(fwd=True, num_quantizers=6)
    backward = mlp.get_quantizer_roles(fwd=False, num_quantizers=4)
    assert [str(role) for role in forward] == [
        "linear|input|block.mlp.fc1",
        "linear|weight|block.mlp.fc1",
        "linear|input|block.mlp.fc2",
        "linear|input|block.mlp.fc2",
        "linear|weight|block.mlp.fc2",
        "dpa|qkv|next",
    ]
    assert [str(role) for role in backward] == [
        "linear|grad_output|block.mlp.fc1",
        "None",
        "linear|grad_output|block.mlp.fc2",
        "linear|grad_output|block.mlp.fc1",
    ]
    with pytest.raises(ValueError, match="has 6 slots for quantizers"):
        mlp.get_quantizer_roles(fwd=True, num_quantizers=3)


def test_each_layer_can_have_its_own_formats():
    """With fc1 left in high precision, what is quantized is fc2 alone."""
    mlp = make(name="mlp")
    x, dy = inputs()
    recipe = as_recipe("mxfp8; *.fc1: hp")
    mixed, exact, quantized = (step(mlp, x, r, dy) for r in (recipe, None, MXFP8BlockScaling()))
    assert not torch.equal(mixed["y"], exact["y"]) and not torch.equal(mixed["y"], quantized["y"])
    formats = [type(quantizer).__name__ for quantizer in _built(mlp, x, recipe)["scaling_fwd"][:5]]
    assert formats == ["IdentityQuantizer"] * 2 + ["MXFP8Quantizer"] * 3


def _built(mlp, x, recipe):
    with cg.autocast(recipe=recipe):
        mlp(x)
    return mlp.quantizers


def test_names_as_elsewhere():
    names = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert list(make().state_dict()) == names
    assert list(make(normalization="RMSNorm", bias=False).state_dict()) == [names[0], names[2], names[4]]
    mlp = make()
    step(mlp, inputs()[0], MXFP8BlockScaling())
    assert list(mlp.state_dict()) == names


def test_results_that_are_asked_for():
    x, _ = inputs()
    plain, other = make(), make(return_bias=True, return_layernorm_output=True)
    y, bias, normed = other(x)
    assert bias is other.fc2_bias
    torch.testing.assert_close(y + bias, plain(x))
    torch.testing.assert_close(normed, torch.nn.functional.layer_norm(x, (64,), bias=other.layer_norm_bias))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_fwd_nvfp4_bwd"])
def test_options_of_linear_layers_work_here(name):
    mlp = make()
    x, dy = inputs()
    recipe = recipe_named(name)
    torch.manual_seed(0)
    plain = step(mlp, x, recipe, dy)

    late = copy.deepcopy(mlp)
    late.delay_wgrad_compute = True
    torch.manual_seed(0)
    step(late, x, recipe, dy, is_first_microbatch=True)
    assert list(late._fp8_workspaces) == ["fc1_weight", "fc2_weight"]
    late.backward_dw()
    assert not late.need_backward_dw()

    fused = copy.deepcopy(mlp)
    fused.fuse_wgrad_accumulation = True
    for weight in (fused.fc1_weight, fused.fc2_weight):
        weight.main_grad = torch.zeros_like(weight)
    torch.manual_seed(0)
    step(fused, x, recipe, dy)
    for weight in ("fc1_weight", "fc2_weight"):
        assert torch.equal(getattr(late, weight).grad, plain[f"d {weight}"])
        torch.testing.assert_close(getattr(fused, weight).main_grad, plain[f"d {weight}"])
