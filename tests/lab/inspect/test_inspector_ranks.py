"""The Inspector where ranks share layers: no bit changes, each rank sees and writes what it quantizes itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain.lab import Inspector, read_inspection

from ...common.ranks import mesh_of, run

HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"


def tensor_parallel():
    options = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    first = cg.Linear(64, 128, parallel_mode="column", name="first", **options)
    return nn.Sequential(first, cg.Linear(128, 64, parallel_mode="row", name="second", **options))


def sharded():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    cg.convert(model, HYBRID)
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    return fully_shard(model, mesh=mesh_of(2))


def trained(make, looks, path):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(32, 64).requires_grad_()
    losses = []
    look = Inspector(model, path if looks else None, every=1, what_if=["nvfp4(rht, sr)"])
    for _ in range(2):
        if looks:
            look.open()
        with cg.autocast(recipe=HYBRID):
            loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if looks:
            look.step()
    look.close()
    return [*losses, x.grad, torch.get_rng_state()]


def compared(rank, path):
    same = {}
    for make in (tensor_parallel, sharded):
        plain, seen = (trained(make, looks, path / f"{make.__name__}.jsonl") for looks in (False, True))
        same[make.__name__] = all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
    return same


def test_two_ranks(tmp_path):
    (tmp_path / "out").mkdir()
    assert run(compared, 2, tmp_path, tmp_path / "out") == [{"tensor_parallel": True, "sharded": True}] * 2
    for rank in range(2):
        shared = read_inspection(tmp_path / "out" / f"tensor_parallel.rank{rank}.jsonl")
        assert (shared.header["rank"], shared.header["ranks"], shared.steps) == (rank, 2, [0, 1])
        in_use = {(r["layer"], r["tensor"], r["direction"]) for r in shared.at() if r["what_if"] is None}
        assert {layer for layer, _, _ in in_use} == {"first", "second"} and len(in_use) == 12
        cut = read_inspection(tmp_path / "out" / f"sharded.rank{rank}.jsonl")
        assert {record["layer"] for record in cut.at()} == {"0", "1"}
        assert cut.first_bad_step() is None
