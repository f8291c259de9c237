"""Quantized copies of weights across microbatches: shared when the caller says so, and never stale otherwise."""

import copy
import pickle

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels
from crossgrain import recipe as recipes

from ..common.families import PLAIN, assert_same_step, make_recipe, run, sizes, without_randomness
from ..common.logs import warned
from ..common.quantizers import buffers_of

MXFP8 = recipes.MXFP8BlockScaling()


@pytest.fixture(params=[name for name in PLAIN if name != "fp8_delayed"])
def recipe(request):
    return without_randomness(make_recipe(request.param))


@pytest.fixture
def layer():
    return cg.Linear(64, 96)


def forward(layer, x, recipe=MXFP8, first=None):
    with cg.autocast(recipe=recipe):
        return layer(x, is_first_microbatch=first)


def change_unseen(layer):
    """What the optimizer does; the cache does not follow it."""
    with torch.no_grad():
        layer.weight.mul_(3.0)


@pytest.mark.parametrize("shape", [(64, 96), (40, 50)])
def test_the_same_numbers_as_without_a_cache(recipe, shape):
    layer = cg.Linear(*shape)
    x, dy = sizes(32, *shape)
    plain = run(layer, x, recipe, dy)
    for first in (True, False, False):
        assert_same_step(run(layer, x, recipe, dy, is_first_microbatch=first), plain)


def test_the_caller_says_when_it_is_made(layer, recipe):
    x, dy = sizes()
    before = run(layer, x, recipe, dy, is_first_microbatch=True)
    change_unseen(layer)
    if recipe.custom():
        return  # identity copies nothing
    with warned("weight was changed after its quantized copy was made"):
        assert_same_step(run(layer, x, recipe, dy, is_first_microbatch=False), before)
    after = run(layer, x, recipe, dy, is_first_microbatch=True)
    assert not torch.equal(after.y, before.y)
    assert_same_step(after, run(layer, x, recipe, dy))


def test_none_neither_uses_nor_makes_a_copy(layer):
    x, _ = sizes()
    forward(layer, x)
    assert not layer._fp8_workspaces
    forward(layer, x, first=True)
    change_unseen(layer)
    assert torch.equal(forward(layer, x), forward(layer, x, first=True))


def test_quantized_once_for_all_microbatches(layer, monkeypatch):
    seen = []
    real = kernels.encode

    def spy(x, *rest, **flags):
        seen.append(tuple(x.shape))
        return real(x, *rest, **flags)

    monkeypatch.setattr(kernels, "plan", lambda *_: None)
    monkeypatch.setattr(kernels, "encode", spy)
    x, dy = sizes()
    for first in (True, False, False):
        run(layer, x, MXFP8, dy, is_first_microbatch=first)
    assert seen.count((96, 64)) == 1


def test_a_copy_without_the_direction_that_is_needed_is_made_again(layer):
    x, dy = sizes()
    with torch.no_grad():
        forward(layer, x, first=True)
    (copied,) = layer._fp8_workspaces.values()
    assert copied.get_usages() == {"rowwise": True, "columnwise": False}
    run(layer, x, MXFP8, dy, is_first_microbatch=False)
    (copied,) = layer._fp8_workspaces.values()
    assert copied.get_usages() == {"rowwise": True, "columnwise": True}
    with torch.no_grad():
        forward(layer, x, first=False)
    assert next(iter(layer._fp8_workspaces.values())) is copied


def test_a_copy_serves_later_microbatches_whose_input_needs_a_gradient(layer):
    x, dy = sizes()
    run(layer, x.detach(), MXFP8, dy, is_first_microbatch=True)
    (copied,) = layer._fp8_workspaces.values()
    run(layer, x, MXFP8, dy, is_first_microbatch=False)
    assert next(iter(layer._fp8_workspaces.values())) is copied


def test_backward_and_evaluation_leave_the_copy_whole(layer, recipe):
    x, _ = sizes()
    y = forward(layer, x, recipe, first=True)
    (copied,) = layer._fp8_workspaces.values()
    before = buffers_of(copied)
    y.sum().backward()
    with torch.no_grad():
        forward(layer, x, recipe, first=False)
    after = buffers_of(copied)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_new_copy_does_not_disturb_what_an_earlier_microbatch_saved(layer):
    x, dy = sizes()
    expected = run(layer, x, MXFP8, dy)
    y = forward(layer, x, first=True)
    change_unseen(layer)
    forward(layer, x, first=True)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, expected.dx)


def test_a_graph_does_not_keep_the_whole_copy(layer):
    """Only the plane that backward reads, which hooks can move: the copy belongs to the cache."""
    x, _ = sizes()
    y = forward(layer, x, first=True)
    assert y.grad_fn.call.quantized_weight is None


# ---- invalidation -------------------------------------------------------------------------------------


def _load(layer):
    layer.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()})


def _assign(layer):
    layer.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()}, assign=True)


def _convert(layer):
    layer.to(torch.float64).to(torch.float32)
    change_unseen(layer)


def _replace(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 3)


def _reset(layer):
    layer.reset_parameters()


def _clear(layer):
    change_unseen(layer)
    layer.clear_weight_cache()


def _other_recipe(layer):
    change_unseen(layer)
    with torch.no_grad():
        forward(layer, torch.ones(1, 64), recipes.NVFP4BlockScaling())


def _change_recipe(layer):
    layer.output_quantizer_role = cg.QuantizerRole("linear", "input", "next")
    change_unseen(layer)


@pytest.mark.parametrize(
    "change",
    [_load, _assign, _convert, _replace, _reset, _clear, _other_recipe, _change_recipe],
    ids=lambda f: f.__name__,
)
def test_what_changes_parameters_or_recipe_drops_the_copy(layer, change):
    x, dy = sizes()
    before = run(layer, x, MXFP8, dy, is_first_microbatch=True)
    change(layer)
    after = run(layer, x, MXFP8, dy, is_first_microbatch=False)
    assert not torch.equal(after.y, before.y)
    assert_same_step(after, run(layer, x, MXFP8, dy))


def test_a_part_of_a_model_is_loaded_or_moved_with_it(layer):
    model = torch.nn.Sequential(layer)
    x, dy = sizes()
    for change in (_load, _convert):
        run(layer, x, MXFP8, dy, is_first_microbatch=True)
        change(model) if change is _load else (model.double().float(), change_unseen(layer))
        assert_same_step(run(layer, x, MXFP8, dy, is_first_microbatch=False), run(layer, x, MXFP8, dy))


def test_a_copy_serves_only_the_parameter_it_was_made_from(layer):
    """functional_call puts other parameters in place for a while."""
    x, dy = sizes()
    own = run(layer, x, MXFP8, dy, is_first_microbatch=True)
    other = {"weight": torch.randn(96, 64), "bias": torch.zeros(96)}
    with cg.autocast(recipe=MXFP8):
        y = torch.func.functional_call(layer, other, (x,), {"is_first_microbatch": False})
        expected = torch.func.functional_call(layer, other, (x,))
    assert torch.equal(y, expected)
    assert_same_step(run(layer, x, MXFP8, dy, is_first_microbatch=False), own)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copied_layer_has_a_cache_of_its_own(layer, duplicate):
    x, dy = sizes()
    own = run(layer, x, MXFP8, dy, is_first_microbatch=True)
    twin = duplicate(layer)
    assert not twin._fp8_workspaces
    change_unseen(twin)
    assert not torch.equal(run(twin, x, MXFP8, dy, is_first_microbatch=False).y, own.y)
    assert_same_step(run(layer, x, MXFP8, dy, is_first_microbatch=False), own)


def test_a_validation_that_refreshes_the_copy_keeps_what_training_needs(layer, monkeypatch):
    x, dy = sizes()
    run(layer, x, MXFP8, dy, is_first_microbatch=True)
    with torch.no_grad():
        forward(layer, x, first=True)
    made = []
    quantize = cg.MXFP8Quantizer.quantize_impl
    monkeypatch.setattr(
        cg.MXFP8Quantizer, "quantize_impl", lambda self, t: (made.append(tuple(t.shape)), quantize(self, t))[1]
    )
    run(layer, x, MXFP8, dy, is_first_microbatch=False)
    assert tuple(layer.weight.shape) not in made


@pytest.mark.parametrize(
    "line", ["fprop: hp, dgrad: mxfp8, wgrad: mxfp8", "fprop: mxfp8, dgrad: hp, wgrad: mxfp8", "all: hp"]
)
def test_a_copy_of_a_direction_in_high_precision_does_not_follow_the_weight(layer, line):
    """A later microbatch computes with one weight in both directions, not with new numbers in one of them."""
    x = torch.randn(64, 64, requires_grad=True)
    y = forward(layer, x, line, first=True)
    y.backward(torch.ones_like(y))
    dx, x.grad = x.grad, None
    change_unseen(layer)
    with warned("computes with the old numbers"):
        again = forward(layer, x, line, first=False)
    again.backward(torch.ones_like(y))
    assert torch.equal(again, y)
    assert torch.equal(x.grad, dx)
