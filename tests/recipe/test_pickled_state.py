"""Pickled extra states: what is ignored, what is refused. Nothing is ever loaded."""

import pickle

import pytest
import torch

from crossgrain import compat
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    factories,
)
from crossgrain.recipe.pickled_state import (
    _RECIPE_POLICIES,
    UNSAFE_PICKLE_EXTRA_STATE_ENV,
    CheckpointExtraStatePolicy,
    should_load_extra_state_pickle,
)

HISTORIES = {"scale_fwd": torch.ones(1), "amax_history_fwd": torch.zeros(1, 1)}
CUSTOM = CustomRecipe(qfactory=factories.mxfp8_factory)


def pickled(recipe, protocol=None, **more):
    return pickle.dumps({"recipe": recipe, "extra_fp8_variables": {}, **more}, protocol=protocol)


def theirs(data):
    """The same pickle with the names that Transformer Engine would write (for classes of one module)."""
    return data.replace(b"crossgrain.recipe.blockwise", b"transformer_engine.common.recipe")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4BlockScaling(), CUSTOM]
)
def test_recipes_without_histories_hold_nothing(recipe, protocol):
    assert not should_load_extra_state_pickle(pickled(recipe, protocol), "fc1")


def test_recipes_of_transformer_engine_are_known_by_their_names():
    data = theirs(pickled(MXFP8BlockScaling(), 0))  # texts of protocol 0 may change their length
    assert b"transformer_engine" in data
    assert not should_load_extra_state_pickle(data, "fc1")


@pytest.mark.parametrize("data", [b"", pickle.dumps({}), pickle.dumps({"extra_fp8_variables": {}})])
def test_what_names_no_class_holds_nothing(data):
    assert data == b"" or not should_load_extra_state_pickle(data, "fc1")


@pytest.mark.parametrize(
    "data",
    [
        pickled(DelayedScaling(), **HISTORIES),
        pickled(DelayedScaling()),
        pickled(CUSTOM, **HISTORIES),
        pickled(MXFP8BlockScaling(), **HISTORIES),
        pickle.dumps({"scale_fwd": 1.0}),
        pickle.dumps({"scale_inv_fwd": torch.ones(1)}),
        pickle.dumps({"recipe": object()}),
        pickle.dumps(MXFP8BlockScaling()),
        pickled(MXFP8BlockScaling())[:-1],
        b"not a pickle",
    ],
)
def test_everything_else_is_refused_without_the_opt_in(data, monkeypatch):
    with pytest.raises(RuntimeError, match=f"fc1: the extra state is a pickle.*{UNSAFE_PICKLE_EXTRA_STATE_ENV}"):
        should_load_extra_state_pickle(data, "fc1")
    monkeypatch.setenv(UNSAFE_PICKLE_EXTRA_STATE_ENV, "1")
    assert should_load_extra_state_pickle(data, "fc1")


def test_a_class_that_is_named_through_the_memo_is_seen():
    """The second time, a pickle repeats the position of a text instead of the text."""
    data = pickle.dumps(["transformer_engine.common.recipe", "DelayedScaling", {"recipe": MXFP8BlockScaling()}])
    assert not should_load_extra_state_pickle(data, "fc1")
    texts = (MXFP8BlockScaling.__module__.encode(), b"MXFP8BlockScaling", b"recipe")
    pushed = b"".join(b"\x8c" + bytes([len(text)]) + text + b"\x940" for text in texts)
    by_memo = b"\x80\x04" + pushed + b"h\x00h\x01\x93."
    assert not should_load_extra_state_pickle(by_memo, "fc1")


def test_every_recipe_has_a_policy():
    def below(cls):
        return [each for sub in cls.__subclasses__() for each in (sub, *below(sub))]

    ours = [cls for cls in below(Recipe) if cls.__module__.startswith("crossgrain.")]
    assert len(ours) >= 8
    for cls in ours:
        for module in ("transformer_engine.common.recipe", cls.__module__):
            assert _RECIPE_POLICIES[module, cls.__name__] in CheckpointExtraStatePolicy
    assert compat.transformer_engine.pytorch._extra_state._RECIPE_POLICIES is _RECIPE_POLICIES
