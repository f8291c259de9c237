"""Recomputation of activations: loss, every gradient and all that delayed scaling learns are those without it."""

import gc
import itertools
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain.runtime.passes import Tape

from ..common.recomputation import (
    ALL,
    MODULES,
    NAMES,
    RECIPES,
    ROWS,
    WIDTH,
    WITHOUT_DROPOUT,
    Attention,
    Grouped,
    Mlp,
    Operations,
    Run,
    assert_same,
    checkpoints,
    direct,
    without_recomputation,
)


class TestHighPrecision:
    """A first pass that quantizes nothing is recomputed without quantizing, whatever is around ``backward()``."""

    @staticmethod
    def gradients(layer, first, again, between=None, recompute=None):
        layer.zero_grad()
        x = torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH).requires_grad_()
        with first:
            y = layer(x) if recompute is None else torch_checkpoint(layer, x, use_reentrant=recompute)
        if between is not None:
            between()
        with again:
            y.backward(torch.ones(32, WIDTH) / 7)
        return x.grad, layer.weight.grad

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_of_a_bound_recipe_that_an_autocast_has_disabled(self, reentrant):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        cg.convert(layer, "mxfp8")
        plain = self.gradients(layer[0], cg.autocast(enabled=False), nullcontext())
        again = self.gradients(layer[0], cg.autocast(enabled=False), nullcontext(), recompute=reentrant)
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_of_a_layer_that_is_recomputed_in_an_autocast(self, reentrant):
        layer = cg.Linear(WIDTH, WIDTH)
        plain = self.gradients(layer, nullcontext(), nullcontext())
        again = self.gradients(layer, nullcontext(), cg.autocast(recipe="mxfp8"), recompute=reentrant)
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_of_a_layer_that_has_run_in_an_autocast_in_between(self, reentrant):
        layer = cg.Linear(WIDTH, WIDTH)

        def quantized():
            with cg.autocast(recipe="mxfp8"):
                layer(torch.ones(32, WIDTH))

        plain = self.gradients(layer, nullcontext(), nullcontext())
        again = self.gradients(layer, nullcontext(), nullcontext(), between=quantized, recompute=reentrant)
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
def test_bits_are_those_without_recomputation(name, function, reentrant):
    again = Run(MODULES, RECIPES[name](), checkpoints(function, reentrant)).train().all()
    assert_same(again, without_recomputation(name, tuple(MODULES)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "bound"])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_wherever_the_recipe_comes_from(name, where, reentrant):
    makers = (Mlp, Grouped, Attention)
    again = Run(makers, RECIPES[name](), checkpoints("torch", reentrant), where=where).train().all()
    assert_same(again, without_recomputation(name, makers, where=where))


class Own(nn.Module):
    """Modules under a recipe of their own, before others and after them."""

    def __init__(self):
        super().__init__()
        self.own, self.last = cg.Linear(WIDTH, WIDTH), cg.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with cg.autocast(recipe="fp8"):
            x = self.own(x)
        x = self.last(x)
        with cg.autocast(enabled=False):
            return self.own(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_autocasts_inside_of_what_is_recomputed(name, reentrant):
    again = Run([Own], RECIPES[name](), checkpoints("torch", reentrant)).train().all()
    assert_same(again, without_recomputation(name, (Own,)))


@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
@pytest.mark.parametrize("name", ["delayed", "hybrid", "rounded_columns"])
def test_stochastic_rounding_does_not_need_the_generator_to_be_restored(name, function, reentrant):
    again = Run(WITHOUT_DROPOUT, RECIPES[name](), checkpoints(function, reentrant, preserve_rng_state=False))
    assert_same(again.train().all(), without_recomputation(name, tuple(WITHOUT_DROPOUT)))


def test_dropout_does():
    """What ``preserve_rng_state=False`` gives up: the same loss, but gradients through other masks."""
    loss, dx, *_ = (
        Run([Attention], RECIPES["mxfp8"](), checkpoints("torch", False, preserve_rng_state=False)).train().seen
    )
    plain_loss, plain_dx, *_ = without_recomputation("mxfp8", (Attention,))
    assert torch.equal(loss, plain_loss) and not torch.equal(dx, plain_dx)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "hybrid", "delayed_in_a_hybrid"])
def test_weights_that_are_kept_quantized(name, reentrant):
    makers = (Mlp, Grouped, Operations)
    again = Run(makers, RECIPES[name](), checkpoints("torch", reentrant), quantized=True).train().all()
    assert_same(again, without_recomputation(name, makers, quantized=True))


# ---- what is refused, and what is left behind ---------------------------------------------------------


class ByHand(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(dy)
        return None, x.grad


@pytest.mark.parametrize("where", ["bound", "outside", "inside"])
def test_other_recomputations_of_delayed_scaling_are_refused(where):
    run = Run([lambda: cg.Linear(WIDTH, WIDTH)], RECIPES["delayed"](), ByHand.apply, where=where)
    with pytest.raises(RuntimeError, match=r"Recompute with crossgrain.checkpoint|use crossgrain.checkpoint"):
        run.train()


def test_modules_that_did_not_run_the_first_time_are_refused():
    layers = [cg.Linear(WIDTH, WIDTH), cg.Linear(WIDTH, WIDTH)]
    takes_turns = itertools.cycle(layers)

    def changes(x):
        with cg.autocast(recipe=RECIPES["delayed"]()):
            return next(takes_turns)(x)

    y = torch_checkpoint(changes, torch.randn(ROWS, WIDTH, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="must run the same modules in the same order"):
        y.sum().backward()


def test_a_validation_is_no_step_of_a_reentrant_checkpoint():
    """Its first pass has no gradients either, even where an argument wants some."""
    run = Run([Mlp], RECIPES["delayed"](), checkpoints("torch", True), where="bound")
    run.train(1)
    learned = [value.clone() for value in run.learned()]
    with torch.no_grad():
        run.forward()
    run.checkpoint = lambda function, x: torch_checkpoint(function, x.detach(), use_reentrant=True)
    with pytest.warns(UserWarning, match="None of the inputs"):
        run.forward()
    assert_same(run.learned(), learned)


def test_nothing_is_noted_outside_of_checkpoints_and_notes_go_with_the_graph():
    made = []
    original = Tape.__init__

    def counted(self, outside):
        original(self, outside)
        made.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", counted)
        Run([Mlp], RECIPES["delayed"]()).train(1)
        inside = len(made)
        run = Run([Mlp], RECIPES["delayed"](), checkpoints("torch", False))
        loss, x = run.forward()
    assert inside == 1 and len(made) == 3  # LayerNormMLP(checkpoint=True) is one
    run.backward(loss, x)
    del loss, x
    gc.collect()
    assert not any(tape() for tape in made)


# ---- crossgrain.checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_states_of_a_tracker_are_replayed(reentrant):
    results = []
    for recomputes in (True, False):
        tracker = cg.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        states = partial(lambda tracker: tracker, tracker)
        checkpoint = checkpoints("ours", reentrant, get_rng_state_tracker=states) if recomputes else direct

        def dropped(x, tracker=tracker):
            with tracker.fork():
                return torch.nn.functional.dropout(x, 0.5).square()

        x = torch.linspace(1, 2, 64).requires_grad_()
        for _ in range(2):
            checkpoint(dropped, x).sum().backward()
        results.append([x.grad, *tracker.get_states().values()])
    assert_same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_keyword_arguments_get_gradients(reentrant):
    x, scale = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    cg.checkpoint(
        lambda x, *, scale, power: (x * scale) ** power, x, scale=scale, power=2, use_reentrant=reentrant
    ).sum().backward()
    assert torch.allclose(x.grad, 2 * x * scale**2) and torch.allclose(scale.grad, 2 * scale * x**2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_bias_that_is_returned_is_still_the_parameter(reentrant):
    """As an output of a reentrant checkpoint it would have a history, of which it is a part."""
    layer, x = cg.Linear(32, 32, return_bias=True), torch.randn(8, 32, requires_grad=True)
    grads = []
    for again in (False, True):
        y, bias = cg.checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        assert layer.bias.is_leaf
        layer.zero_grad()
        (y + bias).square().sum().backward()
        grads.append([layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


def test_activations_are_not_distributed():
    with pytest.raises(ValueError, match="needs the tp_group"):
        cg.checkpoint(torch.sin, torch.ones(2), distribute_saved_activations=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_phases_can_be_asked_for(reentrant):
    seen, in_hooks = [], []

    def function(x):
        seen.append((cg.is_fp8_activation_recompute_enabled(), cg.in_fp8_activation_recompute_phase()))
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: in_hooks.append(cg.in_fp8_activation_recompute_phase()))
        return y.cos()

    x = torch.ones(4, requires_grad=True)
    with cg.autocast(recipe="mxfp8"):
        function(x)
        y = cg.checkpoint(function, x, use_reentrant=reentrant)
    y.sum().backward()
    function(x)
    assert seen == [(False, False), (True, False), (True, True), (False, False)]
    assert in_hooks == [False]  # also in the backward pass of a reentrant one, which is inside of it
