"""Second derivatives are refused where they would lack terms, in everything that computes outside of autograd."""

from __future__ import annotations

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


@pytest.mark.parametrize("recipe", [None, "mxfp8", "hp"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_with_a_graph_can_be_used_but_not_differentiated(name, recipe):
    """Also where the gradient that comes in needs none: then torch's own guard would not notice."""
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(64, 64, requires_grad=True)
    line = "all: hp" if recipe == "hp" else recipe
    with cg.autocast(enabled=recipe is not None, recipe=line):
        y = layer(x)
    (plain,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert torch.equal(dx, plain)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        dx.square().sum().backward()


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
