"""Runs of a step: the same bits each time, and nothing is left behind."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.files.random_state import get_random_state
from crossgrain.lab import ReplayError, replay

from .small import DELAYED_AND_RANDOM, Roots, Small, loss_fn, mean_loss, ones_but_one, trained, with_stale_scale


def everything(model, optimizer):
    """All that a replay could change."""
    state = get_random_state()
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [own.grad for own in model.parameters()],
        "values": [None if own.grad is None else own.grad.clone() for own in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "random": [state["torch"], state["python"], state["numpy"]],
        "names": {name: getattr(module, "name", None) for name, module in model.named_modules()},
        "training": model.training,
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("fails", [False, True])
def test_a_replay_leaves_no_trace(fails):
    model, optimizer, batch = with_stale_scale("blocks.1.down", dropout=0.1)
    for own in model.parameters():
        own.grad = torch.ones_like(own)
    before = everything(model, optimizer)
    calls = []

    def noisy(model, batch):
        calls.append(random.random() + np.random.rand())
        if fails and len(calls) > 9:
            raise ZeroDivisionError
        return loss_fn(model, batch)

    try:
        result = replay(model, [batch], noisy, optimizer=optimizer)
        assert result.culprits and not fails
    except ZeroDivisionError:
        assert fails
    after = everything(model, optimizer)
    assert_same(before, after)
    assert all(one is other for one, other in zip(before["gradients"], after["gradients"], strict=True))
    assert len(set(calls)) == 1  # the same random numbers in all runs


def test_training_goes_on_as_if_nothing_had_been():
    losses = []
    for replays in (False, True):
        model, optimizer, batch = trained(DELAYED_AND_RANDOM, dropout=0.1)
        torch.manual_seed(3)
        if replays:
            replay(model, [batch], loss_fn, optimizer=optimizer, runs=8)
        own = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        losses.append(own)
    assert losses[0] == losses[1]


def test_the_step_that_is_repeated_is_the_next_one():
    model, optimizer, batch = trained(DELAYED_AND_RANDOM, dropout=0.1)
    torch.manual_seed(3)
    state = get_random_state()
    torch.rand(5)  # later, the generator is elsewhere
    result = replay(model, [batch], loss_fn, optimizer=optimizer, random_state=state, runs=8)
    torch.manual_seed(3)
    loss = loss_fn(model, batch)
    loss.backward()
    norm = sum(own.grad.double().square().sum() for own in model.parameters()).sqrt()
    assert result.low.loss == loss.item() and result.low.gradient_norm == float(norm)


def test_the_loss_after_the_update_is_that_of_the_updated_weights_in_high_precision():
    model, optimizer, batch = with_stale_scale("blocks.1.down")
    result = replay(model, [batch], loss_fn, optimizer=optimizer, runs=8)
    loss_fn(model, batch).backward()
    optimizer.step()
    updated = Small()
    updated.load_state_dict({name: value for name, value in model.state_dict().items() if "_extra" not in name})
    expected = loss_fn(updated, batch).item()
    assert result.low.loss_after == pytest.approx(expected, rel=1e-6)  # other orders of summation
    assert abs(result.low.loss_after - loss_fn(model, batch).item()) > 1e-4


def test_an_update_is_not_made_with_gradients_that_are_not_finite():
    model = Roots("a")
    cg.convert(model, "fprop: nvfp4, dgrad: hp, wgrad: hp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

    result = replay(model, [ones_but_one()], mean_loss, optimizer=optimizer, update=update)
    assert math.isnan(result.low.loss_after) and math.isfinite(result.high.loss_after)


def test_a_fresh_model_with_histories_can_be_repeated():
    model, _, batch = trained("fp8(delayed(history=4))", steps=0)
    assert replay(model, [batch], loss_fn, runs=8).runs > 2


class OwnGenerator(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.generator = model, torch.Generator()

    def forward(self, tokens):
        y = self.model(tokens)
        return y + torch.randn(y.shape, generator=self.generator)


def test_a_step_that_cannot_be_repeated_is_refused():
    model, _, batch = trained("mxfp8")
    with pytest.raises(ReplayError, match=r"the same when it is repeated: its loss is 3\.\d+, and then 3\.\d+; \d+"):
        replay(OwnGenerator(model), [batch], loss_fn)


def test_gradients_that_cannot_be_repeated_are_named():
    model, _, batch = trained("mxfp8")
    noise = torch.Generator()
    model.blocks[0].up.weight.register_hook(lambda grad: grad + torch.randn(grad.shape, generator=noise))
    with pytest.raises(ReplayError, match=r"repeated: 1 gradients differ \(blocks\.0\.up\.weight\)\. The model"):
        replay(model, [batch], loss_fn)
