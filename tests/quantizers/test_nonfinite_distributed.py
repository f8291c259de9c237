"""NaNs and infinities that only one rank has: all ranks compute with them as if they had the whole tensor."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import crossgrain as cg
from crossgrain.tensor.sharding import local_part

from ..common.ranks import batches, converted_model, mesh_of, quantized_model, run

LINES = {
    "nvfp4": "all: nvfp4",
    "nvfp4_2d": "all: nvfp4(2d)",
    "rht": "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht)",
    "fp8": "all: fp8",
    "fp8_block": "all: fp8_block",
    "mxfp4": "all: mxfp4",
}
BAD = {"nan": torch.nan, "inf": torch.inf}
CASES = [(line, bad) for line in LINES for bad in BAD]
WIDTH, HIDDEN = 64, 256


def models(line):
    return {
        "converted": converted_model(line, hidden=HIDDEN, width=WIDTH),
        # 90 rows on two ranks: shards end in the middle of a block
        "cut blocks": converted_model(line, hidden=90, width=WIDTH),
        "kept quantized": quantized_model(line, hidden=HIDDEN, width=WIDTH),
    }


def spoilt(model, bad, here=True):
    """Let an optimizer put the number into the last row of the first weight, on the rank that has it."""
    weight = model[0].weight
    gradient = torch.zeros(local_part(weight).shape)
    if here:
        gradient[-1, 3] = bad
    if isinstance(weight, DTensor):
        gradient = DTensor.from_local(
            gradient, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
    weight.grad = gradient
    torch.optim.SGD([weight], lr=1.0, foreach=False).step()
    weight.grad = None
    return model


def results_of(model, x):
    """Which numbers of y and dx of the first layer are finite."""
    x = x.clone().requires_grad_()
    hidden = model[0](x)
    hidden.sum().backward()
    return hidden.isfinite(), x.grad.isfinite()


def sharded(rank, ranks):
    mesh, found = mesh_of(ranks), {}
    for name, bad in CASES:
        for kind, model in models(LINES[name]).items():
            fully_shard(model[0], mesh=mesh)
            results_of(model, batches(1, width=WIDTH)[0])  # ranks know each other from the first gather on
            spoilt(model, BAD[bad], here=rank == ranks - 1)
            found[name, bad, kind] = results_of(model, batches(1, width=WIDTH)[0])
    return found


def test_ranks_of_fsdp_agree(tmp_path):
    ranks = run(sharded, 2, tmp_path, 2)
    for name, bad in CASES:
        for kind, model in models(LINES[name]).items():
            y, dx = results_of(spoilt(model, BAD[bad]), batches(1, width=WIDTH)[0])
            assert not y[:, -1].any()
            assert not dx[:, 3].any()
            for found in ranks:
                for mine, whole in zip(found[name, bad, kind], (y, dx), strict=True):
                    assert torch.equal(mine, whole), (name, bad, kind)


def tensor_parallel(rank, ranks):
    found = {}
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(256, 128, generator=generator)
    for name, bad in CASES:
        torch.manual_seed(0)
        layer = cg.Linear(
            128, 256, bias=False, parallel_mode="column", tp_group=dist.group.WORLD, sequence_parallel=True
        )
        x = whole.chunk(ranks)[rank].clone().requires_grad_()
        with torch.no_grad():
            if rank == 1:
                x[5, 3] = BAD[bad]
        with cg.autocast(recipe=LINES[name]):
            y = layer(x)
        y.sum().backward()
        found[name, bad] = y.detach().isfinite(), layer.weight.grad.isfinite()
    return found


def test_rows_that_are_gathered_quantized_show_the_number_on_all_ranks(tmp_path):
    for found in run(tensor_parallel, 2, tmp_path, 2):
        for y, dw in found.values():
            assert not y[128 + 5].any()
            assert not dw[:, 3].any()
