"""A converted layer whose weight another module multiplies is noticed when it trains."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg

from ..common.logs import silent, warned


class Around(nn.Module):
    """Multiplies the weight of its layer itself, as WavLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.hidden = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return functional.linear(self.fc(x), self.hidden.weight)


def test_training_warns_once_and_names_the_layer():
    model, x = Around(), torch.randn(4, 32)
    cg.convert(model, "mxfp8")
    with warned("hidden: its weight has a gradient, but the layer was never called"):
        model(x).sum().backward()
    with silent():
        model(x).sum().backward()
    assert len(cg.convert(Around(), "mxfp8", inputs=x, skip="hidden").left) == 1


@pytest.mark.usefixtures("silently")
@pytest.mark.parametrize("enabled", [True, False])
def test_layers_that_run_are_not_warned_about(enabled):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    cg.convert(model, "mxfp8")
    for own in (model, copy.deepcopy(model)):
        with cg.autocast(enabled=False) if not enabled else torch.enable_grad():
            own(torch.randn(4, 32)).sum().backward()


@pytest.mark.usefixtures("silently")
def test_tied_and_frozen_weights_are_not_watched():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    cg.convert(model, "mxfp8")
    model["a"](torch.randn(4, 32)).sum().backward()


def test_unconvert_and_later_gradients_leave_no_hook():
    model = Around()
    cg.convert(model, "mxfp8")
    cg.unconvert(model)
    assert not model.hidden.weight._post_accumulate_grad_hooks
    model(torch.randn(4, 32)).sum().backward()


def test_parametrized_and_lazy_layers_are_named():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32), nn.LazyLinear(8))
    with warned("50 % of the multiply-adds"):
        report = cg.convert(model, "mxfp8")
    assert "it is parametrized" in report.left["0"] and "no shape yet" in report.left["2"]
    assert sum(product.multiply_adds for product in report.products) == 2 * 32 * 32
