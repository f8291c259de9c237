"""Recipes with a factory: what it is asked, what it may answer, and requests inside hybrids."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, DType
from crossgrain.quantizers.hybrid import HybridQuantizer
from crossgrain.quantizers.request import QuantizerRequest
from crossgrain.recipe import CustomRecipe, DelayedScalingRequest, FP8Format, QuantizerRole, Recipe, RecipeState

from ..common.logs import warned

ROLES = [QuantizerRole("linear", "input", "fc"), QuantizerRole("linear", "weight", "fc"), None]
SHORT = DelayedScalingRequest(amax_history_len=4)


def state_of(factory, mode="forward", roles=ROLES):
    return RecipeState.create(CustomRecipe(factory), mode=mode, num_quantizers=len(roles), roles=roles)


def hybrid(rowwise, columnwise, source="original"):
    return HybridQuantizer(rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source=source)


def mxfp8():
    return cg.MXFP8Quantizer(DType.kFloat8E4M3)


def test_the_factory_is_asked_once_per_slot():
    asked = []

    def factory(role):
        asked.append(role)
        return mxfp8()

    state = state_of(factory)
    assert asked == []
    made = state.make_quantizers()
    assert asked == ROLES
    assert len({id(q) for q in made}) == 3
    assert not state._has_delayed_scaling and state.scale is state.amax_history is None
    assert state._inner_delayed_scaling_recipe is state.delayed is None


def test_without_roles_there_is_a_warning():
    asked = []
    recipe = CustomRecipe(lambda role: asked.append(role) or mxfp8())
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2)
    with warned("no roles"):
        state.make_quantizers()
    assert asked == [QuantizerRole()] * 2


def test_any_recipe_with_a_factory_method_will_do():
    class Mine(Recipe):
        _kind = "custom"

        def qfactory(self, role):
            return mxfp8() if role is None else SHORT

    state = RecipeState.create(Mine(), mode="forward", num_quantizers=3, roles=ROLES)
    assert [type(q) for q in state.make_quantizers()] == [cg.Float8Quantizer, cg.Float8Quantizer, cg.MXFP8Quantizer]


def test_none_is_refused_naming_slot_and_role():
    state = state_of(lambda role: None if role == ROLES[1] else mxfp8())
    with pytest.raises(ValueError, match=r"None for forward slot 1 \(linear\|weight\|fc\).*IdentityQuantizer"):
        state.make_quantizers()
    with pytest.raises(ValueError, match=r"forward slot 2 \(no role\)"):
        state_of(lambda role: mxfp8() if role else None).make_quantizers()


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"a str for forward slot 0 \(linear\|input\|fc\)"):
        state_of(lambda role: "mxfp8").make_quantizers()


def test_slots_never_share_a_quantizer():
    """Usages are set per slot."""
    one = mxfp8()
    first, second, third = state_of(lambda role: one).make_quantizers()
    assert first is one
    second.set_usage(columnwise=False)
    assert first.columnwise_usage and third.columnwise_usage


def test_requests_share_one_state():
    state = state_of(lambda role: SHORT if role else mxfp8())
    first, second, third = state.make_quantizers()
    assert type(third) is cg.MXFP8Quantizer
    assert state.scale.shape == (2,) and state.amax_history.shape == (4, 2)
    second(torch.full((32, 32), 5.0))
    assert state.amax_history[0].tolist() == [0.0, 5.0]
    assert first.dtype is second.dtype is DType.kFloat8E4M3
    assert state._has_delayed_scaling and state._ds_state is state.delayed
    assert state._inner_delayed_scaling_recipe.amax_history_len == 4
    backward = state_of(lambda role: SHORT, "backward")
    assert {q.dtype for q in backward.make_quantizers()} == {DType.kFloat8E5M2}


def test_request_options_reach_the_recipe(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")  # of no concern to a request
    request = DelayedScalingRequest(FP8Format.E4M3, 2, 8, "most_recent", None, False)
    state = state_of(lambda role: request)
    state.make_quantizers()
    inner = state._inner_delayed_scaling_recipe
    assert (inner.fp8_format, inner.margin, inner.amax_history_len) == (FP8Format.E4M3, 2, 8)
    assert (inner.amax_compute_algo, inner.scaling_factor_compute_algo, inner.reduce_amax) == (
        "most_recent",
        None,
        False,
    )


def test_unequal_requests_are_refused_naming_the_slots():
    other = DelayedScalingRequest(amax_history_len=8)
    state = state_of(lambda role: SHORT if role == ROLES[0] else other)
    with pytest.raises(ValueError, match=r"slot 0 \(linear\|input\|fc\).*len=4.*slot 1 \(linear\|weight\|fc\).*len=8"):
        state.make_quantizers()
    nested = state_of(lambda role: SHORT if role == ROLES[0] else hybrid(mxfp8(), other))
    with pytest.raises(ValueError, match=r"slot 1 \(linear\|weight\|fc\), columnwise asks|slot 1 .*, columnwise for"):
        nested.make_quantizers()


def test_unknown_requests_are_refused():
    with pytest.raises(TypeError, match=r"slot 0 \(linear\|input\|fc\) asks for QuantizerRequest\(\)"):
        state_of(lambda role: QuantizerRequest()).make_quantizers()


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_requests_inside_a_hybrid_have_histories_of_their_own(source):
    def factory(role):
        if role is None:
            return SHORT
        return hybrid(SHORT, SHORT, source) if role.tensor_type == "weight" else hybrid(mxfp8(), SHORT, source)

    state = state_of(factory)
    x, w, out = state.make_quantizers()
    assert state.delayed.columns == [(0, COLUMNWISE), (1, ROWWISE), (1, COLUMNWISE), (2, None)]
    assert state.amax_history.shape == (4, 4)
    assert not x.pending() and not w.pending()
    assert type(x.rowwise_quantizer) is cg.MXFP8Quantizer
    children = [x.columnwise_quantizer, w.rowwise_quantizer, w.columnwise_quantizer, out]
    assert all(type(child) is cg.Float8Quantizer for child in children)
    assert [child.scale.data_ptr() for child in children] == [state.scale[i].data_ptr() for i in range(4)]
    assert w.rowwise_quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    w(torch.full((32, 32), 2.0))
    assert state.amax_history[0].tolist() == [0.0, 2.0, 2.0, 0.0]
    x.columnwise_quantizer(torch.full((32, 32), 3.0))
    assert state.amax_history[0].tolist() == [3.0, 2.0, 2.0, 0.0]
    state.delayed.end_step()
    assert state.scale.tolist() == pytest.approx([448 / 3, 224.0, 224.0, 1.0])


def test_strict_mode_keeps_refusing_requests_in_hybrids():
    with cg.settings.override(strict=True), pytest.raises(TypeError, match="rowwise child"):
        state_of(lambda role: hybrid(SHORT, mxfp8())).make_quantizers()


def test_a_new_factory_keeps_the_histories():
    old = state_of(lambda role: SHORT if role else mxfp8())
    old.make_quantizers()
    old.scale.fill_(9.0)
    new = state_of(lambda role: SHORT if role else cg.IdentityQuantizer())
    assert new.inherit_state_from(old)
    quantizers = new.make_quantizers()
    assert new.scale.data_ptr() == old.scale.data_ptr()
    assert new.amax_history.data_ptr() == old.amax_history.data_ptr()
    assert quantizers[0].scale.item() == 9.0


def test_making_quantizers_again_keeps_the_histories():
    state = state_of(lambda role: SHORT)
    state.make_quantizers()
    pointer = state.scale.data_ptr()
    state.make_quantizers()
    assert state.scale.data_ptr() == pointer


@pytest.mark.parametrize(
    "factory",
    [
        lambda role: SHORT,
        lambda role: SHORT if role != ROLES[0] else mxfp8(),
        lambda role: hybrid(SHORT, SHORT) if role == ROLES[0] else mxfp8(),
    ],
    ids=["count", "slots", "directions"],
)
def test_other_histories_start_anew(factory):
    old = state_of(lambda role: SHORT if role else mxfp8())
    old.make_quantizers()
    old.scale.fill_(9.0)
    new = state_of(factory)
    new.inherit_state_from(old)
    new.make_quantizers()
    assert new.scale.data_ptr() != old.scale.data_ptr()
    assert set(new.scale.tolist()) == {1.0}


def test_histories_of_another_length_are_taken_over():
    old = state_of(lambda role: SHORT if role else mxfp8())
    old.make_quantizers()
    old.scale.fill_(9.0)
    new = state_of(lambda role: DelayedScalingRequest(amax_history_len=8) if role else mxfp8())
    new.inherit_state_from(old)
    new.make_quantizers()
    assert set(new.scale.tolist()) == {9.0}
    assert len(new.delayed.amax_history) == 8


def test_nothing_to_inherit():
    stateless = state_of(lambda role: mxfp8())
    stateless.make_quantizers()
    state = state_of(lambda role: SHORT)
    assert not state.inherit_state_from(stateless)
    delayed = RecipeState.create(SHORT.recipe(), mode="forward", num_quantizers=3)
    assert not state.inherit_state_from(delayed)
