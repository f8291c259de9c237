"""`FP8GlobalStateManager`: keys, histories that are registered by hand, contexts by calls."""

import pytest
import torch

from crossgrain import compat
from crossgrain.recipe import DelayedScaling, MXFP8BlockScaling
from crossgrain.recipe.global_state import FP8GlobalStateManager as manager

te = compat.transformer_engine.pytorch
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def nothing_registered():
    manager.reset()
    yield
    manager.reset()


def trained():
    layer = te.Linear(32, 32, bias=False)
    with te.autocast(recipe=RECIPE):
        y = layer(torch.randn(32, 32))
    y.sum().backward()
    return layer


def test_the_keys_find_the_states_of_a_module():
    layer = trained()
    assert layer.fp8_meta[manager.get_meta_tensor_key()].mode == manager.get_fwd_bwd_key()
    assert layer.fp8_meta[manager.get_meta_tensor_key(forward=False)].mode == manager.get_fwd_bwd_key(False)


def test_keys_of_buffers_depend_on_direction_recipe_and_group():
    group = object()
    keys = {
        manager.get_key_in_buffer(forward, recipe, each)
        for forward in (True, False)
        for recipe in (RECIPE, DelayedScaling(amax_history_len=5))
        for each in (None, group)
    }
    assert len(keys) == 8
    assert manager.get_key_in_buffer(True, DelayedScaling(amax_history_len=4), None) in keys
    for forward in (True, False):
        key = manager.get_key_in_buffer(forward, RECIPE, group)
        assert manager.split_key_in_buffer(key) == (forward, manager.get_unique_autocast_key(RECIPE, group))


def test_registered_histories_are_updated_once_by_each_call():
    layer = trained()
    forward, backward = (layer.fp8_meta[manager.get_meta_tensor_key(each)] for each in (True, False))
    for _ in range(2):  # the second call changes nothing
        manager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    keys = [manager.get_key_in_buffer(each, RECIPE, None) for each in (True, False)]
    assert layer.fp8_meta[manager.get_buffer_info()] == [0, keys[0], 0, keys[1]]
    state = manager.quantization_state
    assert state.global_scale_buffer[keys[0]][0] is forward.scale
    assert state.global_amax_history_buffer[keys[1]][0] is backward.amax_history
    assert state.global_amax_buffer[keys[0]][0].data_ptr() == forward.amax_history.data_ptr()
    for each, used in ((True, forward), (False, backward)):
        before = used.amax_history.clone()
        used.amax_history[0] = 7.0
        manager.reduce_and_update_fp8_tensors(forward=each)
        expected = torch.cat((before[:1] * 0, before[2:], torch.full_like(before[:1], 7.0)))
        assert torch.equal(used.amax_history, expected)
    manager.reset()
    forward.amax_history[0] = 5.0
    manager.reduce_and_update_fp8_tensors()
    assert (forward.amax_history[0] == 5.0).all(), "it is not registered any more"


def test_recipes_without_histories_are_not_registered():
    layer = te.Linear(32, 32)
    with te.autocast(recipe=MXFP8BlockScaling()):
        layer(torch.randn(32, 32))
    manager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    manager.copy_forward_fp8_meta_tensors_for_recompute(layer.fp8_meta)
    assert manager.get_buffer_info() not in layer.fp8_meta and not manager.quantization_state.global_amax_buffer


def test_a_recomputation_by_hand_has_the_scales_of_its_first_pass():
    layer = trained()
    state = layer.fp8_meta[manager.get_meta_tensor_key()]
    first = state.scale.clone(), state.amax_history.clone()
    with pytest.raises(RuntimeError, match="call copy_forward_fp8_meta_tensors_for_recompute before the first pass"):
        manager.get_old_fp8_meta_tensors_for_recompute(layer.fp8_meta)
    with pytest.raises(RuntimeError, match="call get_old_fp8_meta_tensors_for_recompute before"):
        manager.restore_fp8_meta_tensors(layer.fp8_meta)
    manager.copy_forward_fp8_meta_tensors_for_recompute(layer.fp8_meta)
    state.scale.mul_(3)
    state.amax_history.add_(1)
    newest = state.scale.clone(), state.amax_history.clone()
    manager.get_old_fp8_meta_tensors_for_recompute(layer.fp8_meta)
    assert torch.equal(state.scale, first[0]) and torch.equal(state.amax_history, first[1])
    manager.restore_fp8_meta_tensors(layer.fp8_meta)
    assert torch.equal(state.scale, newest[0]) and torch.equal(state.amax_history, newest[1])


def test_an_autocast_can_be_entered_and_left_by_calls():
    layer, x = te.Linear(32, 32), torch.randn(32, 32)
    manager.autocast_enter(enabled=True, fp8_recipe=MXFP8BlockScaling())
    assert manager.is_fp8_enabled() and manager.get_fp8_recipe().mxfp8() and not manager.fp8_graph_capturing()
    y = layer(x)
    manager.autocast_exit(True, False)
    assert not manager.is_fp8_enabled()
    with te.autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(layer(x), y)
    with pytest.raises(RuntimeError, match="autocast_exit was called without autocast_enter"):
        manager.autocast_exit()


@pytest.mark.parametrize("call", [te.autocast, manager.autocast_enter])
def test_captures_of_graphs_are_refused(call):
    with pytest.raises(NotImplementedError, match="capture of CUDA graphs"):
        call(_graph=True)


def test_the_largest_numbers_without_ranks_are_those_of_this_rank():
    x = torch.tensor([1.0, 2.0])
    manager.reduce_tensor_across_group_op_max(x, None)
    assert x.tolist() == [1.0, 2.0]
