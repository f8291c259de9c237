"""Initial values that are preserved in high precision: shards, and parts of layers, keep their part of them."""

import copy
import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import crossgrain as cg
from crossgrain.distributed import ColwiseParallel, RowwiseParallel, checkpoint
from crossgrain.tensor.init_values import preserved_value
from crossgrain.tensor.sharding import local_part

from ..common.ranks import bind, digest, mesh_of, mixed_layers, run, shard, train

RECIPES = ("fp8", "mxfp8-fwd-nvfp4-bwd")


def model_of(recipe, seed=0, **sizes):
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = mixed_layers(cg.Linear, **sizes)[:-1]
    bind(model, recipe)
    return model


def adamw(model):
    return cg.optim.with_masters(torch.optim.AdamW, model.parameters(), lr=1e-2)


def trained(model, optimizer=adamw):
    return train(model, optimizer(model), 3), digest(model)


def fused(model):
    return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


def values_of(model):
    return {name: preserved_value(p) for name, p in model.named_parameters() if p.dim() == 2}


def _in_shards(rank, ranks, recipe, sizes):
    model = shard(model_of(recipe, **sizes), mesh_of(ranks))
    values = copy.deepcopy(values_of(model))
    found = trained(model)
    return values, found, values_of(model)


CASES = [(2, "fp8", {}), (2, "mxfp8-fwd-nvfp4-bwd", {}), (4, "fp8", {"hidden": 90, "width": 62})]


@pytest.mark.parametrize(("ranks", "recipe", "sizes"), CASES, ids=["fp8", "hybrid", "uneven"])
def test_masters_of_shards_start_from_them(tmp_path, ranks, recipe, sizes):
    alone = model_of(recipe, **sizes)
    values = {name: p.get_high_precision_init_val() for name, p in alone.named_parameters() if p.dim() == 2}
    values = copy.deepcopy(values)
    expected = trained(alone)
    for rank, (mine, found, left) in enumerate(run(_in_shards, ranks, tmp_path, ranks, recipe, sizes)):
        assert all(torch.equal(mine[name], value.chunk(ranks)[rank]) for name, value in values.items())
        assert found == expected
        assert not any(value is not None for value in left.values()), "they are let go"
    forgotten = model_of(recipe, **sizes)
    for parameter in forgotten.parameters():
        if parameter.dim() == 2:
            parameter.clear_high_precision_init_val()
    assert trained(forgotten) != expected, "the test can tell"


def _from_meta(rank):
    with torch.device("meta"):
        model = shard(model_of("fp8"), mesh_of(2))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return trained(model, fused)


def test_models_made_on_the_meta_device(tmp_path):
    expected = trained(model_of("fp8"), fused)
    assert run(_from_meta, 2, tmp_path) == [expected, expected]


def _cut(rank, recipe):
    """By styles, and then by FSDP2; the second tensor parallel rank begins with other numbers, which do not count."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place, part = mesh.get_local_rank("tensor"), mesh.get_local_rank("data")
    model = model_of(recipe, seed=place)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data"])
    return place, part, values_of(model)


def test_parts_of_layers_in_shards(tmp_path):
    values = values_of(model_of("mxfp8-fwd-nvfp4-bwd"))
    for place, part, mine in run(_cut, 4, tmp_path, "mxfp8-fwd-nvfp4-bwd"):
        for name, dim in (("0.weight", 0), ("2.weight", 1)):
            assert torch.equal(mine[name], values[name].chunk(2, dim)[place].chunk(2)[part]), name


def _written(rank):
    model = shard(model_of("fp8"), mesh_of(2))
    own = local_part(model[0].weight)
    before = preserved_value(model[0].weight) is not None
    own.quantize_(torch.ones(own.shape))
    return before, preserved_value(model[0].weight)


def test_a_shard_that_was_written_stands_for_no_value(tmp_path):
    assert run(_written, 2, tmp_path) == [(True, None)] * 2


def _saved(rank, root):
    model = shard(model_of("fp8"), mesh_of(2))
    checkpoint.save(root, 0, model=model)
    return trained(model)


def _loaded(rank, root, ranks):
    model = model_of("fp8", seed=1)
    model = shard(model, mesh_of(ranks)) if ranks > 1 else model
    checkpoint.load(root, model=model)
    return trained(model)


def test_checkpoints_from_before_the_first_step(tmp_path):
    root = tmp_path / "run"
    expected = run(_saved, 2, tmp_path, root)
    assert run(_loaded, 1, tmp_path, root, 1) == expected[:1]
    assert run(_loaded, 4, tmp_path, root, 4) == expected * 2


def test_a_value_goes_with_its_parameter():
    """At once: the whole of it would be there beside all shards until Python looks for cycles."""
    layer = model_of("mxfp8-fwd-nvfp4-bwd")[0]
    kept = weakref.ref(layer.weight.get_high_precision_init_val.__self__)
    gc.disable()
    try:
        del layer
        assert kept() is None
    finally:
        gc.enable()
