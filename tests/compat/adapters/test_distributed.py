"""Checkpoint functions that clients write themselves, and FSDP."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import compat

te = compat.transformer_engine.pytorch
activation_recompute_forward = te.distributed.activation_recompute_forward


class Own(torch.autograd.Function):
    """Runs without graph, and again in backward in an autocast of its own."""

    @staticmethod
    def forward(ctx, layer, recipe, x):
        ctx.layer, ctx.recipe = layer, recipe
        ctx.save_for_backward(x)
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return layer(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), te.autocast(recipe=ctx.recipe), again:
            y = ctx.layer(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


def step(recipe, run):
    torch.manual_seed(0)
    layer, x = te.LayerNormLinear(64, 32), torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = run(layer, recipe, x)
    y.square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize(
    "recipe", [cg.recipe.MXFP8BlockScaling(), cg.recipe.Float8CurrentScaling(), cg.recipe.Float8BlockScaling()]
)
def test_what_a_client_recomputes_has_the_same_bits(recipe):
    plain = step(recipe, lambda layer, _, x: layer(x))
    assert all(torch.equal(a, b) for a, b in zip(step(recipe, Own.apply), plain, strict=True))


def test_delayed_scaling_is_refused_there():
    with pytest.raises(RuntimeError, match="delayed scaling runs in backward, outside of all checkpoints"):
        step(cg.recipe.DelayedScaling(), Own.apply)


def test_models_that_are_not_sharded_are_not_prepared():
    with pytest.raises(TypeError, match="no module that fully_shard has sharded"):
        te.distributed.prepare_te_modules_for_fsdp(nn.Sequential(te.Linear(32, 32)))


def test_random_states_of_graphs_are_kept():
    distributed = te.distributed
    distributed.set_all_rng_states({"a": torch.arange(3)})
    assert distributed.get_all_rng_states()["a"].tolist() == [0, 1, 2]
    distributed.set_all_rng_states({})
    assert not distributed.graph_safe_rng_available()
