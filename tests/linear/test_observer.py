"""Observers of backward see x, W and dy of every layer in high precision, by the names of recipes."""

from collections import Counter

import pytest
import torch

import crossgrain as cg
from crossgrain.linear.observer import observe_backward


def run(module, x, *args):
    seen = []
    with observe_backward(seen.append):
        y = module(x, *args)
        torch.manual_seed(0)
        dy = torch.randn_like(y)
        y.backward(dy)
    return seen, dy


def test_a_converted_layer_shows_its_operands():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(2, 3, 8, requires_grad=True)
    cg.convert(model, "all: hp")
    (seen,), dy = run(model, x)
    assert seen.layer == "0"
    shown = seen.matrices()
    expected = (x.reshape(6, 8), model[0].weight, dy.reshape(6, 16))
    assert all(torch.equal(a, b) for a, b in zip(shown, expected, strict=True))


def test_the_weight_is_shown_if_the_input_needs_no_gradient():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(6, 8)
    cg.convert(model, "all: hp")
    (seen,), _ = run(model, x)
    assert torch.equal(seen.matrices()[1], model[0].weight)


def test_a_frozen_weight_leaves_the_input_unknown():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(6, 8, requires_grad=True)
    model.requires_grad_(False)
    cg.convert(model, "all: hp")
    (seen,), _ = run(model, x)
    assert seen.x is None and seen.matrices() is None


def test_layers_inside_of_modules_have_the_names_of_recipes():
    module = cg.LayerNormMLP(32, 64, name="mlp")
    cg.convert(module, "all: hp")
    seen, _ = run(module, torch.randn(4, 32, requires_grad=True))
    assert [each.layer for each in seen] == ["mlp.fc2", "mlp.fc1"]


def test_each_group_comes_by_itself_under_one_name():
    module = cg.GroupedLinear(3, 32, 16, name="experts")
    with cg.autocast(recipe=cg.GemmRecipe.load("all: hp")):
        seen, dy = run(module, torch.randn(12, 32, requires_grad=True), [4, 6, 2])
    assert Counter(each.layer for each in seen) == {"experts": 3}
    assert torch.equal(torch.cat([each.matrices()[2] for each in seen]), dy)


def test_operations_are_seen():
    module = cg.ops.Sequential(cg.ops.Linear(32, 16, bias=False))
    with cg.autocast(recipe=cg.GemmRecipe.load("all: hp")):
        seen, _ = run(module, torch.randn(4, 32, requires_grad=True))
    assert len(seen) == 1 and seen[0].matrices()[0].shape == (4, 32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_is_seen_once(reentrant):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(6, 8, requires_grad=True)
    cg.convert(model, "all: hp")
    (seen,), dy = run(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant), x)
    assert torch.equal(seen.matrices()[2], dy)


def test_quantized_operands_are_shown_decoded():
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32)), torch.randn(32, 32, requires_grad=True)
    cg.convert(model, "mxfp8")
    (seen,), _ = run(model, x)
    columns = cg.quantize(x.detach(), "mxfp8").dequantize(direction=cg.COLUMNWISE)
    assert torch.equal(seen.matrices()[0], columns)


def test_nothing_is_seen_afterwards_and_an_error_of_an_observer_is_raised():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(6, 8, requires_grad=True)
    cg.convert(model, "all: hp")
    seen, _ = run(model, x)
    model(x).sum().backward()
    assert len(seen) == 1

    def fails(operands):
        raise ZeroDivisionError(operands.layer)

    with pytest.raises(ZeroDivisionError, match="0"), observe_backward(fails):
        model(x).sum().backward()
    model(x).sum().backward()
