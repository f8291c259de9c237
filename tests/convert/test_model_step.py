"""Steps of delayed scaling without an autocast: a call of the model that was converted is one."""

import copy
import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.recipe import read_extra_state


class Recurrent(nn.Module):
    """Calls its layer three times, with inputs that grow."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails = nn.Linear(32, 32), None

    def forward(self, x):
        for factor in (1.0, 100.0, 10.0):
            y = self.layer(x * factor)
        if self.fails is not None:
            raise self.fails
        return y.sum()


def history(model):
    return read_extra_state(model.layer.get_extra_state())["forward.amax_history"]


@pytest.mark.parametrize(
    "duplicate", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_call_of_the_model_is_a_step_of_delayed_scaling(duplicate):
    model, x = Recurrent(), torch.ones(32, 32)
    cg.convert(model, "all: fp8(e5m2, delayed(history=4))")
    model = duplicate(model)
    for _ in range(2):
        model(x).backward()
    with torch.no_grad():
        model(x * 1000)
    assert history(model)[:, 0].tolist() == [0, 0, 100, 100]
    with cg.autocast(recipe=model.layer.bound_recipe):  # where there is an autocast, that is the step
        model(x), model(x)
    assert history(model)[:, 0].tolist() == [0, 100, 100, 100]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_is_no_step(error):
    model, x = Recurrent(), torch.ones(32, 32)
    cg.convert(model, "all: fp8(e5m2, delayed(history=4))")
    model(x)
    model.fails = error()
    with pytest.raises(error):
        model(x * 7)
    model.fails = None
    model(x * 2)
    assert history(model)[:, 0].tolist() == [0, 0, 100, 200]


def test_an_autocast_after_an_interrupted_call_is_a_step_of_its_own():
    model, other, x = Recurrent(), cg.Linear(32, 32, bias=False), torch.ones(32, 32)
    cg.convert(model, "all: fp8(e5m2, delayed(history=4))")
    model.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(x * 7)
    with cg.autocast(recipe=cg.recipe.DelayedScaling(amax_history_len=4)):
        other(x)
    assert read_extra_state(other.get_extra_state())["forward.amax_history"][:, 0].tolist() == [0, 0, 0, 1]
    assert history(model)[:, 0].tolist() == [0, 0, 0, 0]


def test_a_call_whose_other_hooks_fail_is_no_step():
    model, x = Recurrent(), torch.ones(32, 32)
    failing = [False]

    def hook(module, args, output):
        if failing[0]:
            raise ValueError("a hook")

    model.register_forward_hook(hook)
    cg.convert(model, "all: fp8(e5m2, delayed(history=4))")
    model(x)
    failing[0] = True
    with pytest.raises(ValueError, match="a hook"):
        model(x * 7)
    assert history(model)[:, 0].tolist() == [0, 0, 0, 100]


class Silent(Recurrent):
    """Returns nothing."""

    def forward(self, x):
        super().forward(x)


def test_a_call_while_an_error_is_handled_is_a_step():
    model, x = Silent(), torch.ones(32, 32)
    cg.convert(model, "all: fp8(e5m2, delayed(history=4))")
    try:
        raise KeyError
    except KeyError:
        model(x)
    assert history(model)[:, 0].tolist() == [0, 0, 0, 100]


def test_only_delayed_scaling_needs_hooks_on_the_model():
    model = Recurrent()
    cg.convert(model, "all: fp8(e5m2, delayed)")
    cg.convert(model, "all: fp8(e5m2, delayed)")
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    cg.convert(model, "mxfp8")
    assert not model._forward_hooks and not model._forward_pre_hooks
    cg.convert(model, "mxfp8; layer: fp8(e5m2, delayed)")
    assert model._forward_hooks
    cg.unconvert(model)
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_hooks_always_called
