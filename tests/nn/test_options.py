"""Options that all modules of linear layers have: each signature lists them, one place passes them on."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.nn.linear_module import LinearModule
from crossgrain.nn.options import options_for

MODULES = {cg.Linear: (64, 64), cg.LayerNormLinear: (64, 64), cg.LayerNormMLP: (64, 64), cg.GroupedLinear: (2, 64, 64)}
# By option: a value that is not the default.
OTHERS = {
    "fuse_wgrad_accumulation": True,
    "rng_tracker_name": "tracker",
    "bias": False,
    "return_bias": True,
    "parallel_mode": "column",
    "delay_wgrad_compute": True,
    "save_original_input": True,
    "name": "layer",
}


def parameters_of(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize(
    "cls, option", [(cls, option) for cls in MODULES for option in OTHERS if option in parameters_of(cls)]
)
def test_a_module_passes_every_common_option_of_its_signature_on(cls, option):
    attribute = {"bias": "use_bias"}.get(option, option)
    assert getattr(cls(*MODULES[cls], **{option: OTHERS[option]}), attribute) == OTHERS[option]


@pytest.mark.parametrize("cls", MODULES)
def test_common_options_have_one_default(cls):
    common = parameters_of(LinearModule.__init__)
    own = {name: parameter for name, parameter in parameters_of(cls.__init__).items() if name in common}
    assert {"sequence_parallel", "tp_group", "tp_size", "name"} <= own.keys()
    assert all(
        parameter.default == common[name].default
        for name, parameter in own.items()
        if common[name].default is not inspect.Parameter.empty
    )


@pytest.mark.parametrize("cls", MODULES)
def test_an_option_that_no_module_has_is_refused(cls):
    with pytest.raises(TypeError, match="has no option 'nonsense'"):
        cls(*MODULES[cls], nonsense=1)


def test_the_tracker_of_random_states_arrives():
    class Tracker:
        def fork(self, name):
            names.append(name)
            return torch.random.fork_rng()

    names = []
    cg.Linear(64, 64, get_rng_state_tracker=Tracker, rng_tracker_name="mine")
    assert names == ["mine"]


def test_options_are_chosen_by_name_and_the_rest_is_handed_over():
    def function(self, a, *, b=2, **rest): ...

    class Layer(nn.Module):
        def __init__(self, other=0, b=3, a=1, **rest):
            super().__init__()
            self.options = options_for(function, {"other": other, "b": b, "a": a, "rest": rest, "self": self})

    assert Layer(b=5, c=6).options == {"a": 1, "b": 5, "c": 6}
