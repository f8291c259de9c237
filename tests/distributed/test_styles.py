"""Styles for `parallelize_module`, and operations that ranks share, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import crossgrain as cg
from crossgrain import ops
from crossgrain import recipe as recipes
from crossgrain.distributed import ColwiseParallel, RowwiseParallel, reduce_sequence_parallel_gradients

from ..common.ranks import error_of, run

RANKS = 2
WIDTH, FFN = 64, 128


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, FFN), nn.ReLU(), nn.Linear(FFN, WIDTH))
    with torch.no_grad():
        for parameter in layers.parameters():  # whole numbers: sums are exact, in whatever order
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    cg.convert(layers, "mxfp8")
    return layers


def batch():
    return torch.randint(-2, 3, (64, WIDTH), generator=torch.Generator().manual_seed(1)).float()


def train(layers, x, share=lambda tensor: tensor):
    """Two steps of AdamW; outputs and parameters."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=2.0, eps=1.0, weight_decay=0.0)
    outputs = []
    for _ in range(2):
        y = layers(x)
        y.backward(share(torch.ones(64, WIDTH)))
        reduce_sequence_parallel_gradients(layers)
        outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs, {name: whole(p) for name, p in layers.named_parameters()}


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def styled(rank, sequence_parallel):
    mesh = init_device_mesh("cpu", (RANKS,))
    styles = {
        "0": ColwiseParallel(sequence_parallel=sequence_parallel),
        "2": RowwiseParallel(sequence_parallel=sequence_parallel),
    }
    layers = parallelize_module(model(), mesh, styles)
    assert (layers[0].out_features, layers[2].in_features) == (FFN // RANKS, FFN // RANKS)
    placements = {name: p.placements for name, p in layers.named_parameters()}
    assert placements == {
        "0.weight": (Shard(0),),
        "0.bias": (Shard(0),),
        "2.weight": (Shard(1),),
        "2.bias": (Replicate(),),
    }
    state = get_model_state_dict(layers)
    assert all(torch.equal(whole(state[name]), p) for name, p in model().state_dict().items())
    share = (lambda tensor: tensor.chunk(RANKS)[rank]) if sequence_parallel else (lambda tensor: tensor)
    as_dtensor = distribute_tensor(batch(), mesh, [Shard(0)], src_data_rank=None)  # whatever it is, it is made fit
    with torch.no_grad():
        assert torch.equal(layers(as_dtensor), layers(share(batch())))
    return train(layers, share(batch()), share)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_training(tmp_path, sequence_parallel):
    outputs, parameters = train(model(), batch())
    parts = run(styled, RANKS, tmp_path, sequence_parallel)
    for rank, (mine, shards) in enumerate(parts):
        for step, (y, expected) in enumerate(zip(mine, outputs, strict=True)):
            expected = expected.chunk(RANKS)[rank] if sequence_parallel else expected
            if step == 0:
                assert torch.equal(y, expected)
            assert torch.allclose(y, expected, rtol=1e-4, atol=1e-2)
        for name, parameter in shards.items():
            assert torch.allclose(parameter, parameters[name], rtol=1e-5, atol=1e-5), name


def refused(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    cut = parallelize_module(cg.Linear(64, 64), mesh, ColwiseParallel())
    cut.tp_size = 1
    return [
        error_of(lambda: parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())),
        error_of(lambda: parallelize_module(cut, mesh, ColwiseParallel())),
        error_of(lambda: parallelize_module(cg.Linear(8, 7), mesh, ColwiseParallel())),
        error_of(lambda: parallelize_module(cg.LayerNormLinear(8, 8), mesh, RowwiseParallel())),
        error_of(lambda: parallelize_module(cg.Linear(8, 8, delay_wgrad_compute=True), mesh, RowwiseParallel())),
    ]


def test_refused(tmp_path):
    for errors in run(refused, RANKS, tmp_path):
        words = [
            "convert an nn.Linear with crossgrain.convert first",
            "weight is already a DTensor; call parallelize_module before fully_shard",
            "rows of weight=7",
            "a norm needs whole rows",
            "delay_wgrad_compute",
        ]
        for (_, text), word in zip(errors, words, strict=True):
            assert word in text


# ---- operations ----------------------------------------------------------------------------------------------


def operations(group=None, **options):
    modes = {"tensor_parallel_group": group, **options} if group is not None else {}
    column, row = ({"tensor_parallel_mode": mode, **modes} if modes else {} for mode in ("column", "row"))
    return ops.Sequential(ops.Linear(WIDTH, FFN, **column), ops.ReLU(), ops.Linear(FFN, WIDTH, **row))


def run_operations(layers, x, dy, recipe):
    x = x.clone().requires_grad_()
    with cg.autocast(recipe=RECIPES[recipe]):
        y = layers(x)
    y.backward(dy)
    reduce_sequence_parallel_gradients(layers)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in layers.named_parameters()}


RECIPES = {"mxfp8": recipes.MXFP8BlockScaling(), "fp8": recipes.Float8CurrentScaling()}
CUTS = {"0.weight": 0, "0.bias": 0, "2.weight": 1}


def shared_operations(rank, sequence_parallel, recipe):
    layers = operations(dist.group.WORLD, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        for (name, mine), theirs in zip(layers.named_parameters(), model().parameters(), strict=True):
            mine.copy_(theirs.chunk(RANKS, CUTS[name])[rank] if name in CUTS else theirs)
    x, dy = batch(), torch.ones(64, WIDTH)
    if sequence_parallel:
        x, dy = x.chunk(RANKS)[rank], dy.chunk(RANKS)[rank]
    return run_operations(layers, x, dy, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_operations(tmp_path, sequence_parallel, recipe):
    layers = operations()
    layers.load_state_dict(model().state_dict())
    expected = run_operations(layers, batch(), torch.ones(64, WIDTH), recipe)
    for rank, found in enumerate(run(shared_operations, RANKS, tmp_path, sequence_parallel, recipe)):
        for name, theirs in expected.items():
            if name in CUTS:
                theirs = theirs.chunk(RANKS, CUTS[name])[rank]
            elif sequence_parallel and name in ("y", "dx"):
                theirs = theirs.chunk(RANKS)[rank]
            if recipe == "fp8" and name in ("y", "dx"):  # sums over ranks, which are not exact under this scale
                assert torch.allclose(found[name], theirs, rtol=1e-5, atol=1e-3), name
            else:
                assert torch.equal(found[name], theirs), name
