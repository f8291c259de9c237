"""Linear in autograd's hands: kept graphs, recomputation, in-place writes, threads, hooks, shared weights."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import read_extra_state

from ..common.families import PLAIN, assert_same_step, make_hybrid_recipe, make_recipe, run, sizes, without_randomness

MXFP8 = recipes.MXFP8BlockScaling()
NO_HISTORY = [name for name in PLAIN if name != "fp8_delayed"]


@pytest.fixture(params=list(PLAIN))
def recipe(request):
    return without_randomness(make_recipe(request.param))


def quantized_layer(recipe, **options):
    with cg.quantized_model_init(recipe=recipe):
        return cg.Linear(64, 96, **options)


# ---- backward, again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"save_original_input": True}], ids=["", "original"])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("family", NO_HISTORY)
def test_a_kept_graph_runs_backward_again(family, hybrid, options):
    recipe = make_hybrid_recipe(family) if hybrid else without_randomness(make_recipe(family))
    layer = cg.Linear(64, 96, **options)
    x, dy = sizes()
    with cg.autocast(recipe=recipe):
        y = layer(x)
    rng = torch.get_rng_state()
    first = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy, retain_graph=True)
    torch.set_rng_state(rng)
    second = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, [x], dy)


def test_memory_is_freed_by_backward_even_if_the_output_lives(recipe):
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    refs = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: refs.append(weakref.ref(t)) or t, lambda t: t),
        cg.autocast(recipe=recipe),
    ):
        y = layer(x.detach().clone().requires_grad_().clone())  # the graph holds on to leaves
    y.backward(dy)
    gc.collect()
    alive = [ref() for ref in refs if ref() is not None and ref().numel() > 1]
    assert not [t for t in alive if t is not layer.weight and t.data_ptr() != layer.weight.data_ptr()]


@pytest.mark.parametrize("recipe", [name for name in PLAIN if name != "identity"], indirect=True)
def test_double_backward_is_refused(recipe):
    layer = cg.Linear(64, 96)
    x, _ = sizes()
    with cg.autocast(recipe=recipe):
        y = layer(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


# ---- writes in between --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("layer_kind", ["no recipe", "identity", "original", "quantized"])
def test_a_write_to_what_backward_needs_is_noticed(what, layer_kind):
    recipe = {"no recipe": None, "identity": make_recipe("identity")}.get(layer_kind, MXFP8)
    if layer_kind == "quantized":
        layer = quantized_layer(recipe)
    else:
        layer = cg.Linear(64, 96, save_original_input=layer_kind == "original")
    x, _ = sizes()
    x = x.detach().clone().requires_grad_() * 1.0
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    needed = {"no recipe": True, "identity": True, "original": what == "input", "quantized": what == "weight"}
    with torch.no_grad():
        (x if what == "input" else layer.weight).copy_(torch.zeros(()).expand(32 if what == "input" else 96, 64))
    if needed[layer_kind]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()


def test_a_write_before_a_delayed_weight_gradient_is_noticed():
    layer = cg.Linear(64, 96, delay_wgrad_compute=True, name="fc1")
    x = torch.randn(32, 64)
    layer(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="fc1: .* changed in place before backward_dw"):
        layer.backward_dw()


def test_the_output_may_be_changed_in_place(recipe):
    layer = cg.Linear(64, 96)
    for shape in ((32, 64), (2, 16, 64), (5, 64)):
        x = torch.randn(shape, requires_grad=True)
        with cg.autocast(recipe=recipe):
            y = layer(x)
        y.mul_(2).relu_().sum().backward()
        assert x.grad is not None


def test_saving_empties_neither_weight_nor_cache(recipe):
    layer = quantized_layer(recipe)
    usages, before = layer.weight.get_usages(), layer.weight.dequantize().clone()
    x, _ = sizes()
    with cg.autocast(recipe=recipe):
        y = layer(x)
    assert layer.weight.get_usages() == usages and torch.equal(layer.weight.dequantize(), before)
    y.sum().backward()
    assert layer.weight.get_usages() == usages and torch.equal(layer.weight.dequantize(), before)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("hybrid", [False, True])
def test_quantizing_the_input_is_no_write_to_it(family, hybrid):
    """Other operations have saved it."""
    recipe = make_hybrid_recipe(family) if hybrid else make_recipe(family)
    layer = cg.Linear(64, 96)
    x = torch.randn(32, 64, requires_grad=True).sigmoid()  # which saves its output
    version = x._version, layer.weight._version
    with cg.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()
    assert (x._version, layer.weight._version) == version


def test_a_stale_plane_of_the_weight_is_refused_in_forward():
    """Only backward would read it, and by then autograd has taken the buffers for what they are."""
    layer = quantized_layer(MXFP8)
    alias = layer.weight.detach()
    alias.update_usage(columnwise_usage=False)
    alias.copy_(torch.randn(96, 64))
    x, _ = sizes()
    with cg.autocast(recipe=MXFP8), pytest.raises(RuntimeError, match="columnwise .* stale"):
        layer(x)


# ---- modes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_evaluating_between_steps_changes_no_bit_of_training(recipe, quantized, mode, first):
    """Weights keep the planes that training needs, whatever evaluation asks for; caches and histories too."""
    runs = []
    for evaluate in (False, True):
        torch.manual_seed(5)
        layer = quantized_layer(recipe) if quantized else cg.Linear(64, 96)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            x, dy = sizes()
            with cg.autocast(recipe=recipe):
                y = layer(x, is_first_microbatch=first)
            if evaluate:
                with mode(), cg.autocast(recipe=recipe):
                    layer(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), is_first_microbatch=first)
            y.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(y.detach())
            if evaluate:
                with mode(), cg.autocast(recipe=recipe):
                    layer(torch.ones(1, 64), is_first_microbatch=first)
        weight = layer.weight.dequantize() if quantized else layer.weight
        runs.append((losses, weight.detach().clone()))
    assert torch.equal(runs[0][1], runs[1][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def test_a_layer_first_used_in_inference_mode_can_be_trained(recipe):
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    with torch.inference_mode(), cg.autocast(recipe=recipe):
        layer(x.detach(), is_first_microbatch=True)
    run(layer, x, recipe, dy, is_first_microbatch=False)


def test_calibration_computes_in_high_precision_and_takes_statistics():
    layer = cg.Linear(64, 96)
    x, _ = sizes()
    with cg.autocast(enabled=False, calibrating=True, recipe=recipes.DelayedScaling()):
        y = layer(x)
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    scale = layer._built.states["forward"].scale
    torch.testing.assert_close(scale[:2], 448 / torch.stack([x.abs().max(), layer.weight.abs().max()]).detach())


def test_delayed_scaling_without_an_autocast_ends_a_step_with_each_forward():
    bound, plain = cg.Linear(64, 96), cg.Linear(64, 96)
    plain.load_state_dict(bound.state_dict())
    bound.bound_recipe = recipe = make_recipe("fp8_delayed")
    for _ in range(3):
        x, dy = sizes()
        y = bound(x)
        dx, dw = torch.autograd.grad(y, [x, bound.weight], dy)
        step = run(plain, x, recipe, dy)
        assert torch.equal(y, step.y) and torch.equal(dx, step.dx) and torch.equal(dw, step.dw)
    with torch.no_grad():
        before = read_extra_state(bound.get_extra_state())["forward.amax_history"]
        bound(1000 * x)
        assert torch.equal(read_extra_state(bound.get_extra_state())["forward.amax_history"], before)


def test_a_bound_recipe_serves_where_no_autocast_says_otherwise():
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    expected, plain = run(layer, x, MXFP8, dy), run(layer, x, None, dy)
    layer.bound_recipe = MXFP8
    x = x.detach().requires_grad_()
    assert torch.equal(layer(x), expected.y)
    with cg.autocast(enabled=False):
        assert torch.equal(layer(x), plain.y)


# ---- sharing ------------------------------------------------------------------------------------------


def test_one_weight_in_two_layers(recipe):
    first, second = cg.Linear(64, 64), cg.Linear(64, 64)
    second.weight = first.weight
    x = torch.randn(32, 64)
    with cg.autocast(recipe=recipe):
        y = second(first(x))
    y.sum().backward()
    together = first.weight.grad.clone()
    first.weight.main_grad = torch.zeros(64, 64)
    first.fuse_wgrad_accumulation = second.fuse_wgrad_accumulation = True
    if not recipe.delayed():
        with cg.autocast(recipe=recipe):
            y = second(first(x))
        y.sum().backward()
        torch.testing.assert_close(first.weight.main_grad, together)


def test_functional_call(recipe):
    layer = cg.Linear(64, 96)
    other = {"weight": torch.randn(96, 64, requires_grad=True), "bias": torch.randn(96, requires_grad=True)}
    x, dy = sizes()
    twin = cg.Linear(64, 96)
    with torch.no_grad():
        twin.weight.copy_(other["weight"])
        twin.bias.copy_(other["bias"])
    expected = run(twin, x, recipe, dy)
    with cg.autocast(recipe=recipe):
        y = torch.func.functional_call(layer, other, (x,))
    y.backward(dy)
    assert torch.equal(y, expected.y) and torch.equal(other["weight"].grad, expected.dw)
    assert layer.weight.grad is None


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_gradients_beside_autograd_do_not_get_lost_in_a_computed_weight(option):
    layer = cg.Linear(64, 96, bias=False, **{option: True})
    weight = layer.weight.detach().requires_grad_() * 2
    with pytest.raises(RuntimeError, match="computed from other tensors"):
        torch.func.functional_call(layer, {"weight": weight}, (torch.randn(4, 64),))


def test_hooks_see_gradients_as_they_do_in_torch(recipe):
    """As data-parallel training needs it."""
    layer = cg.Linear(64, 96)
    seen = []
    layer.weight.register_hook(lambda grad: seen.append(("grad", tuple(grad.shape))))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad is not None)))
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append(("module", tuple(dx[0].shape))))
    x, dy = sizes()
    run(layer, x, recipe, dy)
    assert set(seen) == {("grad", (96, 64)), ("accumulated", True), ("module", (32, 64))}


def test_threads_with_recipes_of_their_own():
    """One layer, several threads, each in its own autocast: none sees the quantizers of another."""
    layer = cg.Linear(64, 96)
    x = torch.randn(32, 64)
    kinds = {name: without_randomness(make_recipe(name)) for name in ("mxfp8", "nvfp4", "fp8_block", "fp8_current")}
    expected, wrong = {}, []
    for name, recipe in kinds.items():
        with torch.no_grad(), cg.autocast(recipe=recipe):
            expected[name] = layer(x)

    def work(name):
        try:
            for _ in range(10):
                inp = x.clone().requires_grad_()
                with cg.autocast(recipe=kinds[name]):
                    y = layer(inp)
                if not torch.equal(y, expected[name]):
                    wrong.append(name)
                torch.autograd.grad(y.sum(), inp)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(name,)) for name in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_gradient_of_none_and_an_unused_output():
    layer = cg.Linear(64, 96)
    x, _ = sizes()
    with cg.autocast(recipe=MXFP8):
        y = layer(x)
        unused = layer(x)
    (y.sum() + 0 * unused.detach().sum()).backward()
    first = layer.weight.grad.clone()
    layer.zero_grad()
    assert_same_step(run(layer, x, MXFP8), run(layer, x, MXFP8))
    assert first.isfinite().all()
