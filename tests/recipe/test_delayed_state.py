"""Delayed scaling: quantizers look into the state, steps end, histories are inherited."""

import pytest
import torch

import crossgrain as cg
from crossgrain import DType
from crossgrain.recipe import DelayedScaling, FP8Format, MXFP8BlockScaling, RecipeState
from crossgrain.recipe.delayed_state import _amax_and_scale_update, _default_sf_compute

from ..common.golden_cases import golden


def state_of(recipe=None, mode="forward", count=3):
    return RecipeState.create(recipe or DelayedScaling(amax_history_len=4), mode=mode, num_quantizers=count)


def test_buffers_and_types():
    recipe = DelayedScaling(amax_history_len=7)
    forward, backward = state_of(recipe), state_of(recipe, "backward", 2)
    assert forward.scale.tolist() == [1.0] * 3
    assert forward.amax_history.shape == (7, 3) and not forward.amax_history.any()
    assert backward.amax_history.shape == (7, 2)
    assert [q.dtype for q in forward.make_quantizers()] == [DType.kFloat8E4M3] * 3
    assert [q.dtype for q in backward.make_quantizers()] == [DType.kFloat8E5M2] * 2
    assert state_of(DelayedScaling(fp8_format=FP8Format.E4M3), "backward", 1).dtype is DType.kFloat8E4M3


def test_quantizers_look_into_the_state():
    state = state_of()
    first, second, _ = state.make_quantizers()
    assert all(type(q) is cg.Float8Quantizer for q in (first, second))
    second(torch.full((16, 16), -3.0))
    assert state.amax_history[0].tolist() == [0.0, 3.0, 0.0]
    second(torch.full((16, 16), 2.0))
    assert state.amax_history[0].tolist() == [0.0, 3.0, 0.0], "casts of one step accumulate"
    state.scale[1] = 2.0
    assert second(torch.full((16, 16), 3.0))._scale_inv.item() == 0.5
    state.end_step()
    assert state.amax_history[:, 1].tolist() == [0.0, 0.0, 0.0, 3.0]
    assert second.scale.item() == pytest.approx(448.0 / 3.0)
    assert state.scale[0] == 1.0, "a tensor that saw nothing keeps its scale"
    assert second(torch.ones(16, 16))._scale_inv.item() == pytest.approx(3.0 / 448.0)


@golden("fp8_delayed_scaling.npz", lambda case: "amax_seq" in case)
def test_golden_evolution(case, monkeypatch):
    """Real casts of one-element tensors, ended by the state, give the golden histories and scales."""
    forward = case["fp8"] == "e4m3"
    recipe = DelayedScaling(margin=case["margin"], amax_history_len=case["history_len"], amax_compute_algo=case["algo"])
    sequence = case.tensor("amax_seq")
    for kind in ("fused", "unfused"):
        monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", str(int(kind == "unfused")))
        state = state_of(recipe, "forward" if forward else "backward", sequence.shape[1])
        quantizers, histories, scales = state.make_quantizers(), [], []
        for amaxes in sequence:
            for quantizer, amax in zip(quantizers, amaxes, strict=True):
                quantizer(amax.expand(16, 16))
            state.end_step()
            histories.append(state.amax_history.clone())
            scales.append(state.scale.clone())
        case.check(f"{kind}_history", torch.stack(histories))
        case.check(f"{kind}_scale", torch.stack(scales))
    case.assert_complete()


def test_functions_of_the_recipe():
    def rule(amax, old_scale, fp8_max, recipe):
        assert fp8_max == 448.0 and recipe.margin == 1
        return old_scale + amax

    recipe = DelayedScaling(
        1, amax_history_len=3, amax_compute_algo=lambda h: h.sum(0), scaling_factor_compute_algo=rule
    )
    state = state_of(recipe, count=1)
    state.amax_history[0] = 2.0
    state.end_step()
    assert state.scale.item() == 3.0
    assert state.amax_history[:, 0].tolist() == [0.0, 0.0, 2.0]
    state.end_step()
    assert state.scale.item() == 5.0
    assert state.amax_history[:, 0].tolist() == [0.0, 2.0, 0.0], "functions roll in any case"


def test_helpers_of_the_field():
    history, scale = torch.tensor([[2.0, 0.0], [1.0, 0.0], [8.0, 0.0]]), torch.ones(2)
    _amax_and_scale_update(history, scale, 448.0, DelayedScaling())
    assert scale.tolist() == [56.0, 1.0]
    assert history[:, 0].tolist() == [0.0, 8.0, 2.0]
    amax = torch.tensor([4.0, 0.0, torch.inf, 1e-45])
    scale = torch.full((4,), 7.0)
    assert _default_sf_compute(amax, scale, 448.0, 1) is scale
    assert scale.tolist() == [56.0, 7.0, 7.0, torch.finfo(torch.float32).max]


def test_inheriting_shares_the_buffers():
    old = state_of()
    old.scale.fill_(3.0)
    new = state_of(DelayedScaling(margin=1, amax_history_len=4))
    assert new.inherit_state_from(old)
    assert new.scale.data_ptr() == old.scale.data_ptr()
    assert new.amax_history.data_ptr() == old.amax_history.data_ptr()
    assert new.make_quantizers()[0].scale.item() == 3.0
    new.amax_history[0] = 1.0
    new.end_step()
    assert new.scale.tolist() == [224.0] * 3, "with the options of the new recipe"


@pytest.mark.parametrize(
    "other",
    [
        lambda: state_of(count=2),
        lambda: state_of(mode="backward"),
        lambda: RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=3),
    ],
    ids=["count", "mode", "kind"],
)
def test_incompatible_states_are_not_inherited(other):
    state = state_of()
    scale = state.scale
    assert not state.inherit_state_from(other())
    assert state.scale is scale


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_history_of_another_length_is_cut_or_extended(length):
    """As Transformer Engine does: the first rows stay, rows of zeros are added, and the scale does not change."""
    old = state_of()
    old.amax_history.copy_(torch.arange(12.0).view(4, 3))
    old.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    new = state_of(DelayedScaling(amax_history_len=length))
    assert new.inherit_state_from(old)
    kept = old.amax_history[:length]
    assert torch.equal(new.amax_history, torch.cat((kept, torch.zeros(length - len(kept), 3))))
    assert new.scale.tolist() == [1.0, 2.0, 3.0]
    assert new.make_quantizers()[1].scale.item() == 2.0


@pytest.mark.parametrize("layer", [lambda: cg.Linear(32, 32), lambda: cg.ops.BasicLinear(32, 32)], ids=["module", "op"])
def test_layers_keep_scales_when_the_length_changes(layer):
    layer = layer()
    for length in (4, 2, 8):
        before = {mode: state.scale.clone() for mode, state in layer._built.states.items()}
        with cg.autocast(recipe=DelayedScaling(amax_history_len=length)):
            y = layer(torch.randn(32, 32, requires_grad=True))
            for mode, scale in before.items():
                assert torch.equal(layer._built.states[mode].scale, scale)
                assert (scale[:1] != 1).all()
        y.sum().backward()
        assert all(len(state.amax_history) == length for state in layer._built.states.values())


def test_another_fp8_type_is_not_inherited():
    """A scale for E5M2 is 128 times that for E4M3."""
    old = state_of(DelayedScaling(amax_history_len=4), "backward")
    new = state_of(DelayedScaling(amax_history_len=4, fp8_format=FP8Format.E4M3), "backward")
    assert not new.inherit_state_from(old)


def test_gradients_do_not_inherit_from_activations():
    e4m3 = DelayedScaling(amax_history_len=4, fp8_format=FP8Format.E4M3)
    assert not state_of(e4m3, "backward").inherit_state_from(state_of(e4m3, "forward"))


def test_a_pass_is_computed_again_with_its_scales():
    state = state_of(count=1)
    quantizer = state.make_quantizers()[0]
    first = state.scale.clone()
    quantizer(torch.full((16, 16), 7.0))
    state.end_step()
    now, history = state.scale.clone(), state.amax_history.clone()
    with state.replaying(first):
        assert quantizer(torch.full((16, 16), 7.0))._scale_inv.item() == 1.0
        assert state.amax_history[0].item() == 7.0
    assert torch.equal(state.scale, now) and torch.equal(state.amax_history, history)


def test_buffers_made_for_inference_can_be_trained():
    with torch.inference_mode():
        state = state_of(count=1)
    assert not state.scale.is_inference() and not state.amax_history.is_inference()
