"""States without histories: which quantizer each slot gets."""

import pytest
import torch

import crossgrain as cg
from crossgrain import DType
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    FP8Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    RecipeState,
)
from crossgrain.recipe import state as states
from crossgrain.recipe.custom_state import CustomRecipeState
from crossgrain.recipe.delayed_state import DelayedScalingRecipeState

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def quantizers(recipe, mode="forward", count=3, roles=None):
    return RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()


def linear(tensor_type, name=""):
    return QuantizerRole("linear", tensor_type, name)


@pytest.mark.parametrize(
    "recipe, cls",
    [
        (DelayedScaling(), DelayedScalingRecipeState),
        (Float8CurrentScaling(), states.Float8CurrentScalingRecipeState),
        (MXFP8BlockScaling(), states.MXFP8BlockScalingRecipeState),
        (Float8BlockScaling(), states.Float8BlockScalingRecipeState),
        (NVFP4BlockScaling(), states.NVFP4BlockScalingRecipeState),
        (CustomRecipe(lambda role: cg.IdentityQuantizer()), CustomRecipeState),
    ],
)
def test_create(recipe, cls):
    roles = [linear("input"), linear("weight"), None]
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles)
    assert type(state) is cls
    assert (state.recipe, state.mode, state.num_quantizers, state.roles) == (recipe, "forward", 3, roles)
    assert len(state.make_quantizers()) == 3
    with pytest.raises(ValueError, match=r"Unexpected recipe mode \(sideways\): it must be forward or backward"):
        RecipeState.create(recipe, mode="sideways")
    with pytest.raises(ValueError, match="one role for each of the 3 quantizers, got 2"):
        RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles[:2])


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match="no state for object"):
        RecipeState.create(object(), mode="forward")


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 1)], ids=str)
def test_a_device_that_is_not_there_is_the_cpu(device):
    if not torch.cuda.is_available():
        state = RecipeState.create(DelayedScaling(), mode="forward", device=device)
        assert state.scale.device.type == "cpu"
        assert cg.Linear(32, 32, device=device).weight.device.type == "cpu"


def test_slot_roles_and_positions():
    roles = [None, QuantizerRole("dpa", "qkv", "a"), linear("weight", "b")]
    state = RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=3, roles=roles)
    assert [state._slot_role(i) for i in range(3)] == [QuantizerRole(), roles[1], roles[2]]
    assert [state._slot_tensor_type(i) for i in range(3)] == ["input", "weight", "weight"]
    forward = RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=5)
    assert [forward._slot_tensor_type(i) for i in range(5)] == ["input", "weight", "output", "input", "weight"]
    backward = RecipeState.create(MXFP8BlockScaling(), mode="backward", num_quantizers=3)
    assert [backward._slot_tensor_type(i) for i in range(3)] == ["grad_output", "grad_input", "grad_output"]


def test_current_scaling():
    recipe = Float8CurrentScaling(use_power_2_scales=True)
    recipe.fp8_quant_fwd_weight = QParams(amax_epsilon=1e-3)
    forward = quantizers(recipe)
    assert [type(q) for q in forward] == [cg.Float8CurrentScalingQuantizer] * 3
    assert [q.dtype for q in forward] == [E4M3] * 3
    assert [q.force_pow_2_scales for q in forward] == [True, False, True]
    assert [q.amax_epsilon for q in forward] == [0.0, 1e-3, 0.0]
    backward = quantizers(recipe, "backward", 2)
    assert [(q.dtype, q.force_pow_2_scales) for q in backward] == [(E5M2, True)] * 2
    recipe.fp8_quant_bwd_grad = QParams(amax_epsilon=2e-3)
    assert [q.amax_epsilon for q in quantizers(recipe, "backward", 2)] == [2e-3, 0.0]


@pytest.mark.parametrize("fmt, backward", [(FP8Format.E4M3, E4M3), (FP8Format.HYBRID, E5M2)])
def test_mxfp8(fmt, backward):
    recipe = MXFP8BlockScaling(fp8_format=fmt, enable_2d_quantization=True)
    assert [(q.dtype, q.with_2d_quantization) for q in quantizers(recipe)] == [
        (E4M3, False),
        (E4M3, True),
        (E4M3, False),
    ]
    assert {(q.dtype, q.with_2d_quantization) for q in quantizers(recipe, "backward", 2)} == {(backward, False)}
    assert not any(q.with_2d_quantization for q in quantizers(MXFP8BlockScaling()))
    attention = [QuantizerRole("dpa", "qkv")] * 3
    assert not any(q.with_2d_quantization for q in quantizers(recipe, roles=attention))


@pytest.mark.parametrize("fmt, backward", [(FP8Format.E4M3, E4M3), (FP8Format.HYBRID, E5M2)])
def test_block_scaling(fmt, backward):
    recipe = Float8BlockScaling(fp8_format=fmt)
    recipe.fp8_quant_bwd_grad = QParams(amax_epsilon=1e-3)
    forward, grad = quantizers(recipe), quantizers(recipe, "backward", 2)
    assert [(q.dtype, q.block_scaling_dim, q.force_pow_2_scales) for q in forward] == [
        (E4M3, 1, True),
        (E4M3, 2, True),
        (E4M3, 1, True),
    ]
    assert {(q.dtype, q.block_scaling_dim, q.force_pow_2_scales, q.amax_epsilon) for q in grad} == {
        (backward, 1, False, 1e-3)
    }
    assert all(q.rowwise_usage and q.columnwise_usage for q in forward + grad)


def options(q):
    return (q.with_rht, q.with_post_rht_amax, q.with_2d_quantization, q.stochastic_rounding, q.row_scaled_nvfp4)


def test_nvfp4():
    rht, tiles = (True, True, False, False, False), (False, False, True, False, False)
    assert [options(q) for q in quantizers(NVFP4BlockScaling())] == [rht, tiles, rht]
    assert [options(q) for q in quantizers(NVFP4BlockScaling(), "backward", 2)] == [
        (True, True, False, True, False)
    ] * 2
    plain = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert {options(q) for q in quantizers(plain) + quantizers(plain, "backward", 2)} == {(False,) * 5}
    rows = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True)
    assert [q.row_scaled_nvfp4 for q in quantizers(rows)] == [True, False, True]
    assert [q.row_scaled_nvfp4 for q in quantizers(rows, "backward", 2)] == [False, False]


@pytest.mark.parametrize(
    "scope, uses",
    [
        ("none", [False, False]),
        ("weights", [False, True]),
        ("activations", [True, False]),
        ("all", [True, True]),
    ],
)
def test_four_over_six_scopes(scope, uses):
    recipe = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_err_mode="MSE")
    made = quantizers(recipe, count=2)
    assert [q.nvfp4_use_4over6 for q in made] == uses
    assert [q.nvfp4_e4m3_max for q in made] == [256 if use else 448 for use in uses]
    assert all(q.nvfp4_4over6_err_mode == "MSE" for q in made)
    assert not any(q.nvfp4_use_4over6 for q in quantizers(recipe, "backward", 2)), "never for gradients"
    headroom = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=scope)
    assert [q.nvfp4_e4m3_max for q in quantizers(headroom, count=2)] == [256 if use else 448 for use in uses]


def test_four_over_six_with_rotation_is_refused():
    with pytest.raises(ValueError, match="nvfp4_use_4over6 and with_rht"):
        quantizers(NVFP4BlockScaling(nvfp4_4over6="all"))


def test_roles_decide_before_positions():
    roles = [linear("weight"), linear("input"), linear("output")]
    assert [q.with_2d_quantization for q in quantizers(NVFP4BlockScaling(), roles=roles)] == [True, False, False]
    grads = [linear("grad_output")]
    assert quantizers(Float8BlockScaling(fp8_format=FP8Format.HYBRID), "forward", 1, grads)[0].dtype is E5M2


def test_a_state_knows_when_its_recipe_has_changed():
    recipe, roles = MXFP8BlockScaling(), [linear("input"), None]
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=roles)
    assert state.fits(recipe, roles) and state.fits(MXFP8BlockScaling(), tuple(roles))
    assert not state.fits(recipe, [linear("input"), linear("output")])
    assert not state.fits(Float8BlockScaling(), roles)
    repr(recipe)
    assert state.fits(recipe, roles), "printing a recipe does not change it"
    recipe.enable_2d_quantization = True
    assert not state.fits(recipe, roles), "changed in place"


def test_states_without_histories_have_nothing_to_inherit():
    one, other = (RecipeState.create(MXFP8BlockScaling(), mode="forward") for _ in range(2))
    assert not one.inherit_state_from(other)
    assert one.delayed is None
