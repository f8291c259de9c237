"""Recomputation with passes in other orders, checkpoints in checkpoints, selective ones, and converted models."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain import recipe as recipes

from ..common.recomputation import (
    ALL,
    NAMES,
    RECIPES,
    WIDTH,
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


def microbatches(run):
    """The quantized weights of the first of three microbatches serve them all; backward in the order of a pipeline."""
    for _ in range(2):
        passes = [run.forward(is_first_microbatch=first) for first in (True, False, False)]
        for loss, x in reversed(passes):
            run.backward(loss, x)
        run.update()


def refreshed_in_between(run):
    """Each of two passes has made its copies of the weights again, with other scales, before backward runs."""
    one, other = run.forward(is_first_microbatch=True), run.forward(is_first_microbatch=True)
    run.backward(*one)
    third = run.forward(is_first_microbatch=False)
    run.backward(*other)
    run.backward(*third)
    run.update()


def validation_in_between(run):
    for _ in range(2):
        training = run.forward()
        with torch.no_grad():
            run.forward()
        run.forward()  # never followed by backward
        run.backward(*training)
        run.update()


def a_kept_graph(run):
    for _ in range(2):
        loss, x = run.forward()
        for retain_graph in (True, True, False):
            run.backward(loss, x, retain_graph=retain_graph)
        run.update()


def backward_in_another_autocast(run):
    for _ in range(2):
        training = run.forward()
        with cg.autocast(recipe=recipes.Float8CurrentScaling()):
            run.backward(*training)
        with cg.autocast(enabled=False):
            run.backward(*run.forward())
        run.update()


def another_recipe_in_between(run):
    """Quantizers are built anew; histories stay."""
    for _ in range(2):
        training = run.forward()
        recipe, run.recipe = run.recipe, recipes.MXFP8BlockScaling()
        run.backward(*run.forward())
        run.recipe = recipe
        run.backward(*training)
        run.update()


ORDERS = [
    microbatches,
    refreshed_in_between,
    validation_in_between,
    a_kept_graph,
    backward_in_another_autocast,
    another_recipe_in_between,
]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
@pytest.mark.parametrize("order", ORDERS)
def test_passes_in_any_order(order, name, reentrant):
    results = []
    for checkpoint in (direct, checkpoints("torch", reentrant)):
        run = Run([lambda: cg.Linear(WIDTH, WIDTH), Mlp], RECIPES[name](), checkpoint)
        order(run)
        results.append(run.all())
    assert_same(*results)


def nested(outer, inner):
    """A checkpoint with one inside, and something after that."""

    def twice(function, x):
        def checkpointed(x):
            return torch_checkpoint(function, x, use_reentrant=inner).sin()

        return torch_checkpoint(checkpointed, x, use_reentrant=outer)

    return twice


def not_nested(function, x):
    return function(x).sin()


NESTED = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize(("outer", "inner"), NESTED)
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_checkpoints_in_checkpoints(name, outer, inner):
    kinds = (nested(outer, inner), not_nested)
    assert_same(*(Run([Mlp, Attention], RECIPES[name](), kind).train().all() for kind in kinds))


@pytest.mark.parametrize("make", [lambda: cg.Linear(WIDTH, WIDTH), Attention], ids=["linear", "attention"])
@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_a_layer_in_several_checkpoints_takes_one_step(outer, inner, make):
    """The backward pass of a reentrant checkpoint is a part of the one around it, however deep it is."""
    results = []
    for kind in (nested(outer, inner), not_nested):
        run = Run([make], recipes.DelayedScaling(amax_history_len=3, fp8_dpa=True), kind)
        run.model = nn.ModuleList([*run.model] * 2)
        results.append(run.train(3).all())
    assert_same(*results)


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_all_blocks_in_one_checkpoint(name, early_stop):
    """A recomputation stops where backward has all it needs, or goes on to the end."""
    results = []
    for checkpoint in (direct, checkpoints("torch", False)):
        run = Run([Mlp, Mlp], RECIPES[name](), checkpoint)
        run.model = nn.ModuleList([nn.Sequential(*run.model)])
        with set_checkpoint_early_stop(early_stop):
            results.append(run.train().all())
    assert_same(*results)


class Mixed(nn.Module):
    """Modules with operations between them, which a policy decides about."""

    def __init__(self):
        super().__init__()
        self.first, self.plain, self.last = cg.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x):
        ones = torch.ones(3, dtype=torch.float32, device=x.device)  # as delayed scaling makes some, but only once
        return self.last(self.plain(self.first(x).sin() * ones[0]).cos())


@pytest.mark.parametrize("name", ["delayed", "hybrid", "mxfp8"])
@pytest.mark.parametrize("save", ["matrix products", "everything"])
def test_selective_checkpoints(name, save):
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        saves = save == "everything" or op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    makers = (Mixed, Grouped, Operations)
    again = Run(makers, RECIPES[name](), checkpoints("ours", False, context_fn=contexts)).train().all()
    assert torch.ops.aten.addmm.default in asked
    assert_same(again, without_recomputation(name, makers))


def converted(name):
    """A model of torch's whose layer is called twice in each step."""
    model = Twice()
    cg.convert(model, RECIPES[name]())
    return model


class Twice(nn.Module):
    checkpoint = staticmethod(direct)

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in (self.layer, self.layer, self.head):
            x = self.checkpoint(lambda x, layer=layer: layer(x).relu() * 3, x)
        return x


@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
@pytest.mark.parametrize("name", ["delayed", "delayed_in_a_hybrid", "hybrid"])
def test_converted_models(name, function, reentrant):
    results = []
    for checkpoint in (checkpoints(function, reentrant), direct):
        run = Run([partial(converted, name)], None, where="bound")
        run.model[0].checkpoint = checkpoint
        results.append(run.train().all())
    assert_same(*results)
