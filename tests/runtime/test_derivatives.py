"""Second derivatives: right where nothing is quantized, refused where they would lack terms."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import crossgrain as cg
from crossgrain import ops
from crossgrain.nn.cross_entropy import parallel_cross_entropy

LAYERS = {
    "Linear": lambda: cg.Linear(64, 64, name="fc"),
    "GroupedLinear": lambda: GroupedOfTwo(),
    "LayerNormLinear": lambda: cg.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: cg.LayerNormMLP(64, 64),
    "LayerNorm": lambda: cg.LayerNorm(64),
    "RMSNorm": lambda: cg.RMSNorm(64),
    "ops": lambda: ops.Sequential(ops.Linear(64, 64), ops.GELU()),
    "cross entropy": lambda: CrossEntropy(),
}


class GroupedOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = cg.GroupedLinear(2, 64, 64)

    def forward(self, x):
        return self.experts(x, [32, 32])


class CrossEntropy(torch.nn.Module):
    def forward(self, x):
        return parallel_cross_entropy(x.unsqueeze(0), torch.zeros(1, x.shape[0], dtype=torch.long))


RIGHT = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm")  # where nothing is quantized


REFUSED = [(name, recipe) for name in LAYERS for recipe in (None, "mxfp8", "all: hp") if name not in RIGHT]
REFUSED += [(name, "mxfp8") for name in ("Linear", "LayerNormLinear", "LayerNormMLP")]


@pytest.mark.parametrize(("name", "recipe"), REFUSED)
def test_a_gradient_with_a_graph_can_be_used_but_not_differentiated(name, recipe):
    """Also where the gradient that comes in needs none: then torch's own guard would not notice."""
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(64, 64, requires_grad=True)
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    (plain,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert torch.equal(dx, plain)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        dx.square().sum().backward()


@pytest.mark.parametrize(("name", "recipe"), REFUSED)
def test_differentiating_by_what_is_no_leaf_is_refused(name, recipe):
    layer, x = LAYERS[name](), torch.randn(64, 64, requires_grad=True)
    hidden = x * 2
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(hidden)
    (dx,) = torch.autograd.grad(y, hidden, torch.ones_like(y), create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(dx.square().sum() + hidden.square().sum(), hidden)


def test_what_leads_to_an_input_keeps_no_memory_of_it():
    layer, x = cg.Linear(64, 64), torch.randn(64, 64, requires_grad=True)
    with cg.autocast(recipe="mxfp8"):
        y = layer(x * 2)
    (entrance,) = y.grad_fn.entrances
    assert entrance.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("of", ["input", "weight of the layer before", "gradient that comes in"])
def test_differentiating_is_refused_for_some_inputs_too(of):
    """`torch.autograd.grad` visits only what leads to its inputs, so the refusal must lie on the way to each."""
    before, layer = torch.nn.Linear(32, 32), cg.Linear(32, 32)
    x, dy = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    hidden = before(x)
    with cg.autocast(recipe="mxfp8"):
        y = layer(hidden)
    (dx,) = torch.autograd.grad(y, hidden, dy, create_graph=True)
    one = {"input": x, "weight of the layer before": before.weight, "gradient that comes in": dy}[of]
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(dx.square().sum() + (y * dy).sum(), one)


def torch_layer(name, layer):
    """The same computation by functions of torch."""

    def gelu(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    def norm(x):
        return torch.nn.functional.layer_norm(x, (64,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)

    linear = torch.nn.functional.linear
    return {
        "Linear": lambda x: linear(x, layer.weight, layer.bias),
        "LayerNormLinear": lambda x: linear(norm(x), layer.weight, layer.bias),
        "LayerNormMLP": lambda x: linear(
            gelu(linear(norm(x), layer.fc1_weight, layer.fc1_bias)), layer.fc2_weight, layer.fc2_bias
        ),
        "LayerNorm": lambda x: torch.nn.functional.layer_norm(x, (64,), layer.weight, layer.bias, layer.eps),
        "RMSNorm": lambda x: torch.nn.functional.rms_norm(x, (64,), layer.weight, layer.eps),
    }[name]


@pytest.mark.parametrize("recipe", [None, "all: hp", "all: mxfp8; fc*: hp"])
@pytest.mark.parametrize("name", RIGHT)
def test_without_quantizing_second_derivatives_are_those_of_torch(name, recipe):
    """Within 1e-9 in float64: sums of 64 products that are added up in another order differ by less."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(torch.float64)
    layer.name = "fc"
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    parameters = [x, *layer.parameters()]
    found = []
    for run in (layer, torch_layer(name, layer)):
        with cg.autocast(recipe=recipe) if run is layer and recipe and "Linear" in name else nullcontext():
            y = run(x)
        firsts = torch.autograd.grad(y.square().sum(), parameters, create_graph=True)
        penalty = sum(first.square().sum() for first in firsts)
        found.append([y, *firsts, *torch.autograd.grad(penalty, parameters)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_graph_changes_no_bit_of_the_gradients():
    for name in RIGHT:
        layer, x = LAYERS[name](), torch.randn(64, 64, requires_grad=True)
        y = layer(x)
        dy, parameters = torch.randn_like(y), [x, *layer.parameters()]
        plain = torch.autograd.grad(y, parameters, dy, retain_graph=True)
        graph = torch.autograd.grad(y, parameters, dy, create_graph=True)
        for mine, theirs in zip(plain, graph, strict=True):
            assert torch.equal(mine, theirs)
        assert graph[0].requires_grad


def test_the_layer_is_named():
    layer, x = cg.Linear(64, 64, name="blocks.3.fc1"), torch.randn(32, 64, requires_grad=True)
    with cg.autocast(recipe="mxfp8"):
        y = layer(x)
    (dw,) = torch.autograd.grad(y.sum(), layer.weight, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^blocks.3.fc1: its gradients"):
        dw.sum().backward()


def test_straight_through_gradients_have_none_to_lack():
    x = torch.randn(32, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(cg.quantize(x, "mxfp8").dequantize().square().sum(), x, create_graph=True)
    dx.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
