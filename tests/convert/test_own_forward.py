"""Users teach convert their own layers: with an adapter, or by what they pass to F.linear."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.recipe import projections


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return functional.linear(input=x, weight=self.weight).softmax(-1)


class Gated(nn.Module):
    """Two weights, one of which is not passed to F.linear as it is."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.up, self.gate, self.hidden = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(64, 32)), hidden

    def forward(self, x):
        gate = self.gate * 2 if self.hidden else self.gate
        return functional.linear(x, self.up) * functional.linear(x, gate).sigmoid()


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(projections, "_by_type", dict(projections._by_type))


def test_a_subclass_of_linear_keeps_what_it_computes_around_the_product():
    layer, plain = Scaled(32, 48), nn.Linear(32, 48)
    plain.load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match="register_layer\\(Scaled, crossgrain.OwnForward\\('weight'\\)\\) converts it"):
        cg.convert(layer, "mxfp8")
    cg.register_layer(Scaled, cg.OwnForward("weight"))
    cg.convert(layer, "mxfp8")
    cg.convert(plain, "mxfp8")
    x = torch.randn(5, 32)
    assert isinstance(layer, Scaled)
    torch.testing.assert_close(layer(x), 2 * plain(x))  # the bias is added after the product is rounded
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    cg.unconvert(layer)
    assert type(layer) is Scaled


def test_weights_of_other_modules_are_not_touched():
    cg.register_layer(Router, cg.OwnForward("weight"))
    model = nn.ModuleDict({"experts": nn.Linear(32, 32), "router": Router()})
    report = cg.convert(model, "mxfp8")
    assert report.converted == ["experts"] and "routers stay in high precision" in report.left["router"]
    report = cg.convert(model, "mxfp8", include="router")
    assert report.bound == ["experts"] and report.converted == ["router"]
    assert model["router"](torch.randn(3, 32)).shape == (3, 4)


def test_several_weights_are_layers_of_their_own():
    cg.register_layer(Gated, cg.OwnForward("up", "gate"))
    model = nn.ModuleDict({"mlp": Gated()})
    report = cg.convert(model, "mxfp8; mlp.gate: nvfp4-plain")
    assert report.formats == {"mlp.up": "mxfp8", "mlp.gate": "nvfp4"}
    assert model["mlp"](torch.randn(3, 32)).shape == (3, 64)


def test_a_product_that_is_not_seen_raises():
    cg.register_layer(Gated, cg.OwnForward("up", "gate"))
    module = Gated(hidden=True)
    cg.convert(module, "mxfp8")
    with pytest.raises(
        RuntimeError, match="forward of Gated did not call torch.nn.functional.linear with its parameter 'gate'"
    ):
        module(torch.randn(3, 32))


class HalfAdapter(cg.LayerAdapter):
    """A module [in, out] whose adapter uses only the first half of its rows."""

    def projections(self, module):
        return [cg.Projection("", "weight", transposed=True)]

    def forward(self, module, multiply, x):
        return multiply("", x, rows=slice(0, 16))


class Stored(nn.Module):
    def __init__(self, names=("weight",)) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.randn(32, 48)))

    def forward(self, x):
        return x @ self.weight


def test_an_adapter_of_a_user():
    cg.register_layer(Stored, HalfAdapter())
    module, layer = Stored(), nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(module.weight.t()[:16])
    cg.convert(module, "mxfp8")
    cg.convert(layer, "mxfp8")
    x = torch.randn(5, 32, requires_grad=True)
    assert torch.equal(module(x), layer(x))
    module(x).sum().backward()
    assert module.weight.grad.shape == (32, 48) and not module.weight.grad[:, 16:].any()


def test_attributes_that_crossgrain_needs_are_not_overwritten():
    cg.register_layer(Stored, HalfAdapter())
    module = Stored()
    module.name = "mine"
    with pytest.raises(ValueError, match="it has an attribute 'name', which crossgrain needs itself"):
        cg.convert(module, "mxfp8")
    assert module.name == "mine"


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="register_layer takes a type of modules"):
        cg.register_layer(Stored(), HalfAdapter())
    with pytest.raises(TypeError, match="takes a crossgrain.LayerAdapter"):
        cg.register_layer(Stored, lambda module: module)
    with pytest.raises(ValueError, match="OwnForward needs the names of the weights"):
        cg.OwnForward()
    cg.register_layer(Stored, cg.OwnForward("kernel"))
    with pytest.raises(ValueError, match="kernel of a Stored is not a parameter \\[out, in\\]"):
        cg.convert(Stored(), "mxfp8")
    cg.register_layer(Stored, HalfAdapter())
    module = Stored()
    cg.convert(module, "mxfp8")
    with pytest.raises(ValueError, match="has no projection 'weight', only ''"):
        module._multiply(module._forward_pass(torch.randn(2, 32), None), "weight", torch.randn(2, 32))
    with pytest.raises(TypeError, match="no tensor of floating-point numbers among its arguments"):
        module(torch.zeros(2, 32, dtype=torch.long))
    with pytest.raises(TypeError, match="is what crossgrain.convert makes"):
        type(module)()
