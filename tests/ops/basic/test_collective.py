"""Collectives: alone they do nothing; on two ranks forward and backward are each other's transpose."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from crossgrain import ops

RANKS = 2


@pytest.mark.parametrize("kind", [ops.AllGather, ops.AllReduce, ops.ReduceScatter])
def test_alone(kind: type) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = kind()(x)
    y.backward(torch.ones(4, 8))
    assert torch.equal(y, x) and torch.equal(x.grad, torch.ones(4, 8))


def test_on_two_ranks(tmp_path: Path) -> None:
    # fork: importing torch again in each rank would take much longer than the test
    mp.start_processes(_rank, args=(str(tmp_path / "store"),), nprocs=RANKS, start_method="fork")


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        xs = [torch.arange(8.0).reshape(4, 2) * (r + 1) for r in range(RANKS)]
        _check(ops.AllGather(), xs, rank, torch.cat(xs))
        _check(ops.AllReduce(), xs, rank, xs[0] + xs[1])
        _check(ops.ReduceScatter(), xs, rank, (xs[0] + xs[1]).chunk(RANKS)[rank])
        with pytest.raises(ValueError, match="3 rows cannot be divided evenly among 2 ranks"):
            ops.ReduceScatter()(torch.ones(3, 2))
        with pytest.raises(ValueError, match="out_features=3 cannot be divided evenly among tp_size=2 ranks"):
            ops.Linear(4, 3, tensor_parallel_mode="column")
    finally:
        dist.destroy_process_group()


def _check(op: ops.BasicOperation, xs: list[torch.Tensor], rank: int, wanted: torch.Tensor) -> None:
    x = xs[rank].clone().requires_grad_()
    y = op(x)
    assert torch.equal(y, wanted)
    y.backward(torch.full_like(y, rank + 1.0))
    sums = {ops.AllGather: torch.full((4, 2), 3.0), ops.AllReduce: torch.full((4, 2), rank + 1.0)}
    scattered = torch.cat([torch.full((2, 2), r + 1.0) for r in range(RANKS)])
    assert torch.equal(x.grad, sums.get(type(op), scattered))
