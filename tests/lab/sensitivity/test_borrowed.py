"""A model is after a measurement what it was before: bits, recipes, gradients, random numbers."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import sensitivity
from crossgrain.lab.sensitivity.borrowed import borrowed

from .small import batches, loss_fn, small


def snapshot(model):
    state = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {
        "types": [type(module) for module in model.modules()],
        "recipes": [str(getattr(module, "bound_recipe", None)) for module in model.modules()],
        "flags": [own.requires_grad for own in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }, [*state.values(), *(own.grad.clone() for own in model.parameters() if own.grad is not None)]


def assert_same(before, after):
    assert before[0] == after[0]
    assert len(before[1]) == len(after[1])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def prepared(recipe):
    model = small()
    if recipe is not None:
        cg.convert(model, recipe)
    loss_fn(model, batches()[0]).backward()  # there are gradients, and quantizers are built
    model.up.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8(delayed)", "nvfp4; up: hp"])
def test_nothing_of_the_model_is_changed(recipe):
    model = prepared(recipe)
    before, random = snapshot(model), torch.get_rng_state()
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=["nvfp4(sr)"])
    assert s.effects
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), random)


def test_training_goes_on_as_if_nothing_had_been_measured():
    losses = []
    for measures in (False, True):
        model = prepared("fp8(delayed)")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for at, batch in enumerate(batches(6)):
            if measures and at == 3:
                sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_nor_after_an_error(error):
    model = prepared("mxfp8")
    before = snapshot(model)

    def fails():
        with borrowed(model):
            loss_fn(model, batches()[1]).backward()
            raise error

    with pytest.raises(error):
        fails()
    assert_same(before, snapshot(model))


def test_buffers_such_as_running_means_are_restored():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    before = copy.deepcopy(model[1])
    data = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(3)]
    sensitivity(model, data, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), base="hp", candidates=["mxfp8"])
    assert torch.equal(model[1].running_mean, before.running_mean)
    assert model[1].num_batches_tracked == 0


def test_modules_that_are_named_otherwise_are_refused():
    model = nn.Sequential(cg.Linear(32, 32, name="mine"))
    with pytest.raises(ValueError, match="mine"), borrowed(model):
        pass
