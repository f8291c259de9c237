"""Amaxes of a hybrid over ranks: each direction over its own group."""

import torch
import torch.multiprocessing as mp

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE

from ..common.quantizers import E4M3, buffers_of


def reducing(row_group, column_group):
    return cg.HybridQuantizer(
        rowwise_quantizer=cg.Float8CurrentScalingQuantizer(
            E4M3, with_amax_reduction=row_group is not None, amax_reduction_group=row_group
        ),
        columnwise_quantizer=cg.NVFP4Quantizer(
            with_amax_reduction=column_group is not None, amax_reduction_group=column_group
        ),
    )


def _rank(rank, path, whole, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    everybody = torch.distributed.new_group([0, 1])
    alone = [torch.distributed.new_group([other]) for other in range(2)][rank]
    shard = whole.chunk(2)[rank]
    found = {}
    cases = {"both": (everybody, everybody), "rows": (everybody, alone), "columns": (None, everybody)}
    for name, groups in cases.items():
        for internal in (False, True):
            h = reducing(*groups)
            h.internal = internal
            q = h(shard)
            h.update_quantized(shard, q)
            found[name, internal] = buffers_of(q)
    results[rank] = found
    torch.distributed.destroy_process_group()


def test_each_direction_reduces_over_its_own_group(tmp_path):
    """A direction whose group is everybody has the rows of the whole, the other those of the shard alone."""
    whole = (torch.randn(64, 64) * torch.logspace(-2, 2, 64).view(64, 1)).to(torch.bfloat16)
    with mp.get_context("fork").Manager() as manager:
        results = manager.dict()
        mp.start_processes(_rank, args=(str(tmp_path / "store"), whole, results), nprocs=2, start_method="fork")
        found = [results[rank] for rank in range(2)]
    h = reducing(None, None)
    of_whole = [buffers_of(piece.clone()) for piece in h(whole).split(32)]
    of_shard = [buffers_of(h(shard)) for shard in whole.chunk(2)]
    assert not torch.equal(of_whole[0]["rowwise_data"], of_shard[0]["rowwise_data"]), "the test can tell"
    shared = {"both": (ROWWISE, COLUMNWISE), "rows": (ROWWISE,), "columns": (COLUMNWISE,)}
    for rank in range(2):
        for (name, _), buffers in found[rank].items():
            for field, buffer in buffers.items():
                direction = ROWWISE if field.startswith("rowwise") else COLUMNWISE
                expected = (of_whole if direction in shared[name] else of_shard)[rank]
                assert torch.equal(buffer, expected[field]), (rank, name, field)
