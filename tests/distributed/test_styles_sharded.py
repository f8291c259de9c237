"""Layers that ranks share by styles of `parallelize_module`, in shards of FSDP2, against one process.

What a layer computes is given, and so is the gradient that it gets back: then neither depends on a sum over ranks,
and all bytes of all weights are those of one process.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import crossgrain as cg
from crossgrain.distributed import ColwiseParallel, RowwiseParallel, gather_by_pass, gather_quantized
from crossgrain.tensor.sharding import local_part

from ..common.quantizers import assert_same_bytes
from ..common.ranks import bind, digest, error_of, run

ROWS, STEPS = 32, 3
STYLES = {"column": ColwiseParallel, "row": RowwiseParallel}
SOME = ("fp8", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht)")
MESHES = {(2, 2): None, (1, 2): SOME, (2, 1): SOME, (2, 1, 2): SOME}  # the last: replicas of one shard

KEPT = {
    "mxfp8": (128, 128),
    "mxfp8-2d": (128, 128),
    "all: mxfp4": (128, 128),
    "all: nvfp4(2d)": (128, 128),
    "all: nvfp4": (128, 128),
    "fp8": (128, 128),
    "fp8-delayed": (128, 128),
    "fp8-block": (512, 256),
    "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht)": (128, 128),
    "fprop: fp8, dgrad: mxfp8, wgrad: mxfp8": (128, 128),
}
GATHERED = dict.fromkeys(
    ("mxfp8", "all: nvfp4(2d)", "all: nvfp4", "fp8", *tuple(KEPT)[-2:]), (192, 128)
)  # split blocks


def layers(recipe, sizes, kept):
    torch.manual_seed(0)
    outputs, inputs = sizes
    if not kept:
        model = nn.ModuleDict({name: nn.Linear(inputs, outputs) for name in STYLES})
        cg.convert(model, recipe)
        return model
    with cg.quantized_model_init(recipe=recipe):
        model = nn.ModuleDict({name: cg.Linear(inputs, outputs) for name in STYLES})
    bind(model, recipe)
    return model


def optimizer_of(model, kept):
    if kept:
        return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, sizes, kept, rank=0, ranks=1):
    """The last output of each layer."""
    outputs, inputs = sizes
    generator = torch.Generator().manual_seed(1)
    optimizer, last = optimizer_of(model, kept), {}
    for _ in range(STEPS):
        for name, layer in model.items():
            x, dy = (torch.randn(ROWS, size, generator=generator) for size in (inputs, outputs))
            if name == "column":
                dy = dy.chunk(ranks, 1)[rank]
            else:
                x = x.chunk(ranks, 1)[rank]
            y = layer(x)
            y.backward(dy)
            last[name] = y.detach()
        optimizer.step()
        optimizer.zero_grad()
    return last


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor")[-len(sizes) :])


def styled(model, mesh):
    return parallelize_module(model, mesh["tensor"], {name: style() for name, style in STYLES.items()})


def sharded(model, mesh, **options):
    for layer in model.values():
        fully_shard(layer, mesh=mesh["replicate", "shard"] if mesh.ndim == 3 else mesh["shard"], **options)
    return model


def own(whole, name, mesh):
    """What a rank has of a parameter: FSDP2 cuts what a tensor parallel rank has."""
    part, shard, tensor = whole, mesh["shard"], mesh["tensor"]
    if name.startswith("column") or name == "row.weight":
        part = part.chunk(tensor.size(), int(name == "row.weight"))[tensor.get_local_rank()]
    return part.chunk(shard.size())[shard.get_local_rank()]


def _compare(rank, mesh_sizes, expected, kept):
    mesh, found = mesh_of(*mesh_sizes), {}
    place, ranks = mesh.get_local_rank("tensor"), mesh["tensor"].size()
    for recipe, (sizes, outputs, weights) in expected.items():
        model = styled(layers(recipe, sizes, kept), mesh)
        if not kept:
            gather_quantized(model)
        sharded(model, mesh)
        if mesh.ndim == 3:
            gather_by_pass(model)
        last = trained(model, sizes, kept, place, ranks)
        assert torch.equal(last["column"], outputs["column"].chunk(ranks, 1)[place]), recipe
        if ranks == 1:
            assert torch.equal(last["row"], outputs["row"]), recipe
        assert torch.allclose(last["row"], outputs["row"], rtol=1e-5, atol=1e-5), (recipe, "a sum over ranks")
        for name, parameter in model.named_parameters():
            mine, theirs = local_part(parameter).detach(), own(weights[name], name, mesh)
            if isinstance(theirs, cg.QuantizedTensor):
                assert_same_bytes(mine, theirs.clone())
            else:
                assert torch.equal(mine, theirs), (recipe, name)
        found[recipe] = digest(model)
    return place, found


@pytest.fixture(scope="module")
def alone():
    """Sizes, last outputs and weights of one process, by whether weights are kept quantized and by recipe."""
    found = {True: {}, False: {}}
    for kept, cases in ((True, KEPT), (False, GATHERED)):
        for recipe, sizes in cases.items():
            model = layers(recipe, sizes, kept)
            outputs = trained(model, sizes, kept)
            found[kept][recipe] = sizes, outputs, {name: p.detach() for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "gathered"])
def test_weights_are_those_of_one_process(tmp_path, alone, kept, mesh):
    expected = {recipe: alone[kept][recipe] for recipe in MESHES[mesh] or alone[kept]}
    hashes = run(_compare, math.prod(mesh), tmp_path, mesh, expected, kept)
    for place in range(mesh[-1]):  # all who have the same part compute with the same bytes
        assert len({str(found) for at, found in hashes if at == place}) == 1


def _from_meta(rank, expected):
    mesh = mesh_of(2, 2)
    for recipe, (sizes, weights) in expected.items():
        with torch.device("meta"):
            model = layers(recipe, sizes, kept=True)
        sharded(styled(model, mesh), mesh).to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in model.values():
            layer.reset_parameters()
        for name, whole in weights.items():
            mine, theirs = local_part(model.get_parameter(name)).detach(), own(whole, name, mesh)
            if name.endswith("weight"):
                assert_same_bytes(mine, theirs.clone())
            else:
                assert torch.equal(mine, theirs)


def test_models_made_on_the_meta_device(tmp_path):
    expected = {}
    for recipe in SOME:
        whole = layers(recipe, KEPT[recipe], kept=True)
        expected[recipe] = KEPT[recipe], {name: p.detach() for name, p in whole.named_parameters()}
    run(_from_meta, 4, tmp_path, expected)


def _of_other_ranks(rank):
    """Ranks that begin with other weights end up with parts of those of the first."""
    mesh = mesh_of(1, 2)
    torch.manual_seed(rank)
    with cg.quantized_model_init(recipe="fp8"):
        layer = cg.Linear(64, 64)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    return local_part(layer.weight).dequantize(), layer.weight.shape


def test_the_first_rank_gives_all_their_part(tmp_path):
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe="fp8"):
        layer = cg.Linear(64, 64)
    (first, shape), (second, _) = run(_of_other_ranks, 2, tmp_path)
    assert torch.equal(torch.cat([first, second]), layer.weight.dequantize())
    assert shape == (64, 64)


def _refused(rank):
    mesh = mesh_of(1, 2)
    kept = layers("mxfp8", (96, 64), kept=True)
    weights = dict(kept.named_parameters())
    too_late = layers("mxfp8", (64, 64), kept=False)
    gather_quantized(too_late)
    errors = [error_of(lambda: styled(kept, mesh)), error_of(lambda: styled(too_late, mesh))]
    return errors, all(weights[name] is parameter for name, parameter in kept.named_parameters())


def test_refused_before_anything_is_cut(tmp_path):
    for (split, late), unchanged in run(_refused, 2, tmp_path):
        assert "weight is kept quantized and cannot be cut for 2 ranks" in split[1]
        assert "columnwise mxfp8 plane can only be cut at multiples of 32 along M, and 48 is not one" in split[1]
        assert "call gather_quantized after parallelize_module" in late[1]
        assert unchanged
