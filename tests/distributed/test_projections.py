"""Fused experts and other projections over ranks: sharded by FSDP2, and replicated by DDP."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import crossgrain as cg
from crossgrain.distributed import gather_quantized

from ..common.experts import Experts
from ..common.ranks import mesh_of, run


class Mixture(nn.Module):
    """A linear layer, attention and experts; every token has the same experts on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.attention = nn.Linear(32, 32), nn.MultiheadAttention(32, 2, batch_first=True)
        self.experts = Experts(experts=4)

    def forward(self, x):
        x = self.fc(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        generator = torch.Generator().manual_seed(0)
        chosen = torch.rand(x.shape[0] * x.shape[1], 4, generator=generator).topk(2).indices
        return self.experts(x.flatten(0, 1), chosen, torch.ones(len(chosen), 2) / 2)


def steps(model, inputs) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for x in inputs:
        y = model(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        found.append(y.detach())
    return found


def _sharded(rank, model, inputs):
    mesh = mesh_of(2)
    left = gather_quantized(model).left
    # Not the attention by itself: FSDP2 passes each argument on as a tensor of its own, and queries, keys and values
    # that are no longer one tensor are three products, whose gradients autograd adds in another order.
    for module in (model.experts, model):
        fully_shard(module, mesh=mesh)
    outputs = steps(model, inputs)
    with torch.no_grad():
        validated = model(inputs[0])
    kept = [bool(m._weight_cache.unchanged.copies) for m in model.modules() if hasattr(m, "_weight_cache")]
    return outputs, validated, left, kept


def _replicated(rank, model, inputs):
    outputs = steps(DistributedDataParallel(model), inputs)
    return outputs, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def model() -> nn.Module:
    model = Mixture()
    cg.convert(model, "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)")
    return model


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 16, 32) for _ in range(3)]


def test_shards_compute_what_one_process_does(model, inputs, tmp_path):
    """Both ranks have the same batch, and the mean of two equal gradients is exact: bit for bit."""
    results = run(_sharded, 2, tmp_path, copy.deepcopy(model), inputs)
    expected = steps(model, inputs)
    with torch.no_grad():
        validated = model(inputs[0])
    for outputs, found, left, kept in results:
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
        assert torch.equal(found, validated)
        assert set(left) == {"attention.in_proj_weight", "experts.gate_up_proj", "experts.down_proj"}
        assert all("not the one matrix of a linear layer" in reason for reason in left.values())
        assert not any(kept)  # a copy of a gathered weight would stay on every rank


def test_replicas_compute_what_one_process_does(model, inputs, tmp_path):
    results = run(_replicated, 2, tmp_path, copy.deepcopy(model), inputs)
    expected = steps(model, inputs)
    for outputs, parameters in results:
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
        assert all(torch.equal(parameters[name], p) for name, p in model.named_parameters())
