"""Collectives that reach quantized tensors move the bytes of their planes, or raise and say of what."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import crossgrain as cg
from crossgrain.optim.weight_update import quantize_master_weights

from ..common.quantizers import buffers_of
from ..common.ranks import digest, error_of, mesh_of, quantized_model, run, train

FORMATS = ("mxfp8", "nvfp4", "fp8", "fp8_block")


def quantized(seed, fmt="mxfp8"):
    torch.manual_seed(seed)
    return cg.quantizer_for(fmt)(torch.randn(64, 64))


def hybrid(seed):
    torch.manual_seed(seed)
    rows, columns = cg.quantizer_for("mxfp8"), cg.quantizer_for("nvfp4")
    return cg.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)(torch.randn(64, 64))


def same_bytes(one, other):
    one, other = buffers_of(one), buffers_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refused_calls(rank, q, plain):
    """By name: calls that have to raise on the ranks that give a quantized tensor, before anything is sent."""
    world, peer = dist.group.WORLD, 1 - rank
    return {
        "all_reduce": lambda: dist.all_reduce(q),
        "reduce": lambda: dist.reduce(q, 0),
        "all_gather, in": lambda: dist.all_gather([plain, plain], q),
        "all_gather, out": lambda: dist.all_gather([q, q], plain),
        "all_gather_into_tensor, in": lambda: dist.all_gather_into_tensor(torch.zeros(128, 64), q),
        "all_gather_into_tensor, out": lambda: dist.all_gather_into_tensor(q, torch.zeros(32, 64)),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([q]),
        "all_gather_coalesced, in": lambda: dist.all_gather_coalesced([[plain], [plain]], [q]),
        "all_gather_coalesced, out": lambda: dist.all_gather_coalesced([[q], [q]], [plain]),
        "reduce_scatter, in": lambda: dist.reduce_scatter(plain, [q, q]),
        "reduce_scatter, out": lambda: dist.reduce_scatter(q, [plain, plain]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(32, 64), q),
        "scatter, in": lambda: dist.scatter(plain, [q, q], group_src=rank),
        "scatter, out": lambda: dist.scatter(q, [plain, plain], group_src=rank),
        "gather, in": lambda: dist.gather(q, [plain, plain], group_dst=rank),
        "gather, out": lambda: dist.gather(plain, [q, q], group_dst=rank),
        "send": lambda: dist.send(q, peer),
        "recv": lambda: dist.recv(q, peer),
        "isend": lambda: dist.isend(q, peer),
        "irecv": lambda: dist.irecv(q, peer),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, q, peer)]),
        "all_to_all, in": lambda: dist.all_to_all([plain, plain], [q, q]),
        "all_to_all, out": lambda: dist.all_to_all([q, q], [plain, plain]),
        "all_to_all_single, in": lambda: dist.all_to_all_single(plain, q),
        "all_to_all_single, out": lambda: dist.all_to_all_single(q, plain),
        "functional all_reduce": lambda: functional.all_reduce(q, "sum", world),
        "functional all_reduce_coalesced": lambda: functional.all_reduce_coalesced([q], "sum", world),
        "functional all_gather_tensor": lambda: functional.all_gather_tensor(q, 0, world),
        "functional all_gather_tensor_autograd": lambda: functional.all_gather_tensor_autograd(q, 0, world),
        "functional reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(q, "sum", 0, world),
        "functional broadcast": lambda: functional.broadcast(q, 0, world),
        "functional all_to_all_single": lambda: functional.all_to_all_single(q, None, None, world),
        "autograd all_reduce": lambda: torch.distributed.nn.all_reduce(q),
        "autograd all_gather": lambda: torch.distributed.nn.all_gather(q),
        "autograd scatter": lambda: torch.distributed.nn.scatter([q, q], rank),
        "distribute_tensor": lambda: distribute_tensor(q, mesh_of(2), [Shard(0)]),
        "full_tensor": lambda: DTensor.from_local(q, mesh_of(2), [Shard(0)]).full_tensor(),
    }


def _refused(rank):
    q, plain = quantized(rank), torch.zeros(64, 64)
    found = {name: error_of(call) for name, call in refused_calls(rank, q, plain).items()}
    alive = torch.ones(1)
    dist.all_reduce(alive)
    return found, same_bytes(q, quantized(rank)), not plain.any(), alive.item()


def test_collectives_that_would_corrupt_raise_before_anything_is_sent(tmp_path):
    for found, unchanged, nothing_arrived, alive in run(_refused, 2, tmp_path):
        for name, error in found.items():
            assert error is not None, name
            assert "called on a quantized tensor, a MXFP8Tensor of shape [" in error[1], (name, error)
        assert unchanged
        assert nothing_arrived
        assert alive == 2, "the group still works"


def _moved(rank):
    found = {}
    for name, make in {**{f: lambda s, f=f: quantized(s, f) for f in FORMATS}, "hybrid": hybrid}.items():
        ways = {
            "broadcast": lambda q: dist.broadcast(q, 0),
            "async": lambda q: dist.broadcast(q, 0, async_op=True).wait(),
            "coalesced": lambda q: dist._broadcast_coalesced(
                dist.group.WORLD, [torch.ones(3), q, q.clone()], 1 << 20, 0
            ),
            "replicated": lambda q: distribute_tensor(q, mesh_of(2), [Replicate()]),
            "checked": lambda q: DTensor.from_local(q, mesh_of(2), [Replicate()], run_check=True),
        }
        for way, broadcast in ways.items():
            q = make(rank)
            result = broadcast(q)
            got = result.to_local() if isinstance(result, DTensor) else q
            found[name, way] = same_bytes(got, make(0))
        pickled = [make(0)] if rank == 0 else [None]
        dist.broadcast_object_list(pickled, 0)
        found[name, "pickled"] = same_bytes(pickled[0], make(0))
        local = DTensor.from_local(make(rank), mesh_of(2), [Shard(0)]).to_local()
        found[name, "from_local"] = same_bytes(local, make(rank))
    return found


def test_broadcasts_move_the_bytes(tmp_path):
    """Columns too, which are not what the decoded rows would give."""
    for found in run(_moved, 2, tmp_path):
        assert all(found.values()), found


def _slices(rank):
    found = {}
    for name, make in {
        "fp8": lambda s: quantized(s, "fp8"),
        "mxfp8": lambda s: quantized(s, "mxfp8"),
        "hybrid": hybrid,
    }.items():
        whole = make(rank)
        error = error_of(lambda part=whole[:32]: dist.broadcast(part, 0))
        rest = same_bytes(whole[32:].clone(), make(rank)[32:].clone())
        found[name] = error, rest, same_bytes(whole[:32].clone(), make(0)[:32].clone())
    return found


def test_a_slice_may_only_be_sent_if_its_scales_are_its_own(tmp_path):
    """The rest of the tensor it was cut from would be read under the scale of another."""
    for rank, found in enumerate(run(_slices, 2, tmp_path)):
        for name, (error, rest_stays, arrived) in found.items():
            assert rest_stays, name
            assert arrived is (name == "mxfp8" or rank == 0), name
            assert (error is None) is (name == "mxfp8"), name
            assert error is None or "shares its per-tensor" in error[1]


class Wrapped(DistributedDataParallel):
    def __getitem__(self, at):
        return self.module[at]


def _zero(rank):
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), cg.optim.FusedAdam, lr=1e-2, master_weights=True)
    trained = train(Wrapped(model), optimizer, 4), digest(model)
    other = quantized_model("mxfp8")
    before = digest(other)
    refused = error_of(
        lambda: ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=1.0)
    )
    return trained, refused, digest(other) == before


def test_zero_redundancy_optimizer(tmp_path):
    """Each rank updates some weights and sends their planes."""
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    alone = train(model, optimizer, 4), digest(model)
    for trained, refused, unchanged in run(_zero, 2, tmp_path):
        assert trained == alone
        assert "cannot be a piece of a larger tensor" in refused[1]
        assert unchanged


def test_vectors_of_parameters_are_numbers():
    model = quantized_model("mxfp8")
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(2 * vector, model.parameters())
    assert torch.equal(parameters_to_vector(model.parameters()), 2 * vector)
    with pytest.raises(RuntimeError, match="cannot be a piece of a larger tensor of shape"):
        model[0].weight.data = torch.zeros(256, 64)[:128]


# ---- one rank fails ------------------------------------------------------------------------------------------


def _bad_masters(rank):
    weight = quantized(0)
    masters = [torch.randn(2048 if rank == 0 else 4000)]
    before = weight.dequantize()
    error = error_of(lambda: quantize_master_weights([weight], masters, [2048 * rank], dist.group.WORLD))
    return error, torch.equal(weight.dequantize(), before)


def _one_stays_away(rank):
    """One rank raises on its own, where the others reduce an amax, and neither takes part nor leaves."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    quantizer = cg.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)
    error = error_of(lambda: quantizer(torch.randn(64, 63 if rank == 1 else 64)))
    dist.barrier()
    return error


def test_a_refusal_is_raised_on_all_ranks(tmp_path):
    (first, kept), (second, also_kept) = run(_bad_masters, 2, tmp_path)
    assert "another rank raised an error about its weights; nothing was written" in first[1]
    assert "[2048, 6048) is not a piece of it" in second[1]
    assert kept and also_kept


def test_nobody_waits_longer_than_the_timeout_for_a_rank_that_failed(tmp_path):
    waiting, failed = run(_one_stays_away, 2, tmp_path)
    assert "63" in failed[1], "the reason"
    assert waiting[0] == "RuntimeError"
    assert "Timed out" in waiting[1]
