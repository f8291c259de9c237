"""Checkpoints in shards of meshes with several dimensions, with moments in few bits and random states of each rank."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import crossgrain as cg
from crossgrain.distributed import ColwiseParallel, RowwiseParallel, checkpoint, gather_quantized
from crossgrain.distributed.plane_matrices import plane_matrices
from crossgrain.tensor.sharding import local_part

from ..common.planes import normal
from ..common.ranks import converted_model, digest, error_of, mesh_of, quantized_model, run, shard, train

SIZES = {"hidden": 128, "width": 128}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


# ---- meshes of several dimensions --------------------------------------------------------------------------


def _layers(kept):
    recipe = "fprop: fp8, dgrad: nvfp4, wgrad: nvfp4"
    return (quantized_model if kept else converted_model)(recipe, **SIZES)[:3]


def _on_mesh(kept, sizes):
    """Columns and rows of layers are shared by the last of two or three dimensions; by none of one."""
    names = ("replicate", "data", "tensor")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names[1:2] if len(sizes) == 1 else names[-len(sizes) :])
    model = _layers(kept)
    if len(sizes) > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if not kept:
        gather_quantized(model)
    return shard(model, mesh["replicate", "data"] if len(sizes) == 3 else mesh["data"])


def _optimizer(model, kept):
    if not kept:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    stored = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}
    return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True, **stored)


def _numbers(model, optimizer):
    """All bytes of weights, and of what states stand for, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        kept = isinstance(local_part(parameter), cg.QuantizedTensor)
        found |= (
            {(name, part): whole(own) for part, own in plane_matrices(parameter.detach())}
            if kept
            else {name: whole(parameter)}
        )
    for index, state in optimizer.state_dict()["state"].items():
        found |= {(index, name): whole(torch.as_tensor(value)) for name, value in state.items()}
    return found


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _save_on_mesh(rank, root, kept, sizes):
    model = _on_mesh(kept, sizes)
    optimizer = _optimizer(model, kept)
    _two_steps(model, optimizer)
    checkpoint.save(root, 2, model=model, optimizer=optimizer)
    return _numbers(model, optimizer)


def _two_steps(model, optimizer):
    for seed in range(2):
        model(normal(32, 128, seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _load_on_mesh(rank, root, kept, sizes):
    model = _on_mesh(kept, sizes)
    optimizer = _optimizer(model, kept)
    checkpoint.load(root, model=model, optimizer=optimizer)
    return _numbers(model, optimizer)


MESHES = [((2, 2), (2,), True), ((2,), (2, 2), True), ((2, 1, 2), (2, 1), True), ((2, 2), (2, 1, 2), False)]


@pytest.fixture(scope="module")
def kernels_are_loaded():
    """Before processes are forked, each of which would do it."""
    for kept in (True, False):
        model = _layers(kept)
        _two_steps(model, _optimizer(model, kept))


@pytest.mark.parametrize(("before", "after", "kept"), MESHES, ids=str)
@pytest.mark.usefixtures("kernels_are_loaded")
def test_from_any_mesh_to_any_other(tmp_path, before, after, kept):
    """Weights, masters, and moments in FP8 and float16."""
    root = tmp_path / "run"
    saved = run(_save_on_mesh, math.prod(before), tmp_path, root, kept, before)
    assert len(saved[0]) > 10
    for found in (*saved, *run(_load_on_mesh, math.prod(after), tmp_path, root, kept, after)):
        assert found.keys() == saved[0].keys()
        for name, value in saved[0].items():
            assert torch.equal(found[name], value), name


def _moments(rank, ranks):
    model = shard(quantized_model("mxfp8", **SIZES), mesh_of(ranks))
    stored = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True, **stored)
    return train(model, optimizer, 3), digest(model)


def test_moments_in_few_bits_have_the_scale_of_the_whole(tmp_path):
    assert run(_moments, 2, tmp_path, 2) == run(_moments, 1, tmp_path, 1) * 2


# ---- random states -----------------------------------------------------------------------------------------


def _random_numbers(rank, root, saves):
    torch.manual_seed(rank if saves else 99)
    random.seed(rank if saves else 99)
    np.random.seed(rank if saves else 99)
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    if saves:
        checkpoint.save(root, 1, model=model)
    else:
        checkpoint.load(root, model=model)
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def _left_alone(rank, root):
    found = []
    for wanted in (False, None, True):
        torch.manual_seed(3)
        model = nn.Linear(2, 2, bias=False)
        before = torch.get_rng_state()
        error = error_of(lambda model=model, wanted=wanted: checkpoint.load(root, model=model, random_state=wanted))
        found.append((error, torch.equal(torch.get_rng_state(), before), model.weight.sum().item() == 4))
    return found


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path):
    root = tmp_path / "run"
    saved = run(_random_numbers, 2, tmp_path, root, True)
    assert saved[0] != saved[1]
    assert run(_random_numbers, 2, tmp_path, root, False) == saved
    for not_wanted, others, refused in run(_left_alone, 4, tmp_path, root):
        assert not_wanted == others == (None, True, True)
        assert "random states of 2 ranks, but it is loaded by 4" in refused[0][1]
        assert refused[1:] == (True, False)
