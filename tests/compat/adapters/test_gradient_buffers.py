"""Optimizers of clients see where gradients are, and refuse what Megatron-core would gather from elsewhere."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import compat

from ...common.logs import silent, warned

te = compat.transformer_engine.pytorch

OPTIMIZERS = [te.optimizers.FusedAdam, te.optimizers.FusedSGD]


def buffered(sizes, recipe, aligned):
    """Parameters with gradients in one buffer, each at a multiple of ``aligned``: a weight and vectors."""
    with cg.quantized_model_init(recipe=recipe):
        params = [cg.Linear(32, 32, bias=False).weight, *(nn.Parameter(torch.zeros(size)) for size in sizes)]
    buffer, start = torch.zeros(4096), 0
    for param in params:
        param.main_grad = buffer[start : start + param.numel()].view(param.shape)
        start += -(-param.numel() // aligned) * aligned
    return params


def made(optimizer, params):
    """In two groups, one of which has the weights."""
    return optimizer([{"params": params[:1]}, {"params": params[1:]}], lr=1e-3, master_weights=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_behind_a_gap_are_refused_if_some_are_kept_in_mxfp8(optimizer):
    params = buffered([96, 96, 64], "mxfp8", aligned=64)
    with pytest.raises(RuntimeError, match=r"2 parameters .* \[96\] \(96 elements\)\. Megatron-core .* multiple of 64"):
        made(optimizer, params)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "sizes, recipe, aligned",
    [
        pytest.param([96, 96, 64], "mxfp8", 1, id="no gaps"),
        pytest.param([64, 128, 96], "mxfp8", 64, id="the last one"),
        pytest.param([64, 64], "mxfp8", 128, id="ends of buckets"),
        pytest.param([96, 96, 64], "fp8", 64, id="another format"),
    ],
)
def test_others_are_not(optimizer, sizes, recipe, aligned):
    assert len(made(optimizer, buffered(sizes, recipe, aligned)).param_groups) == 2


def test_parameters_without_a_buffer_are_not():
    with cg.quantized_model_init(recipe="mxfp8"):
        layer = cg.Linear(32, 96)
    te.optimizers.FusedAdam(layer.parameters(), master_weights=True)


def test_each_optimizer_is_one_class_under_all_its_names():
    assert te.optimizers.fused_adam.FusedAdam is te.optimizers.FusedAdam is compat.optimizers.FusedAdam
    assert te.optimizers.fused_sgd.FusedSGD is te.optimizers.FusedSGD is compat.optimizers.FusedSGD


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_in_mxfp8_that_are_divided_among_ranks_are_warned_about(optimizer):
    params = buffered([64], "mxfp8", aligned=64)
    with warned("1 experts are kept in MXFP8"):
        optimizer([{"params": params[:1], "is_expert_parallel": True}], lr=1e-3, master_weights=True)
    for group in (
        {"params": params[:1], "is_expert_parallel": False},
        {"params": params[1:], "is_expert_parallel": True},
    ):
        with silent():
            optimizer([group], lr=1e-3, master_weights=True)
