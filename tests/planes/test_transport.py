"""Planes of shards in one buffer of bytes, and back, without any ranks."""

import pytest
import torch

import crossgrain as cg
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction
from crossgrain.planes.transport import Shipment, kind_of, packed, rows_of_chunks, unpack

from ..common.quantizers import PAIRS, QUANTIZERS, assert_same_bytes, hybrid_of

WITH_ONE_AMAX = [name for name in QUANTIZERS if "row_scaled" not in name]


def sent(whole, counts, directions=tuple(Direction)):
    """What arrives when the ranks have ``counts`` rows of ``whole``."""
    rows = rows_of_chunks(counts)
    shards = [whole._sliced(0, start, stop) for start, stop in rows]
    kinds = tuple(kind_of(plane) for plane in whole._planes_that_travel(directions))
    shipment = Shipment(tuple(whole.shape), rows, kinds)
    buffers = [packed(shard._planes_that_travel(directions), shipment, rank) for rank, shard in enumerate(shards)]
    return torch.cat(buffers), shipment


@pytest.mark.parametrize("name", WITH_ONE_AMAX)
@pytest.mark.parametrize("counts", [(256, 128), (128, 128, 128, 0), (384,)])
def test_every_format_arrives_as_it_was(name, counts):
    whole = QUANTIZERS[name]()(torch.randn(384, 64))
    gathered, shipment = sent(whole, counts)
    assert gathered.dtype == torch.uint8
    assert gathered.shape == (len(counts), shipment.bytes_per_rank())
    arrived = whole._empty_like()
    for _, buffer in arrived._buffers():
        buffer.view(torch.uint8).fill_(77)  # memory that was let go and comes back is not zero
    unpack(gathered, shipment, arrived._planes_that_travel(tuple(Direction)))
    arrived._derive_planes(tuple(Direction))
    assert_same_bytes(arrived, whole)
    for name, buffer in arrived._buffers():
        assert torch.equal(buffer, dict(whole._buffers())[name]), "padding too"


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "nvfp4_row_scaled" not in pair], ids="/".join)
def test_one_direction_of_a_hybrid(pair):
    whole = hybrid_of(*pair)(torch.randn(256, 64))
    for direction in Direction:
        gathered, shipment = sent(whole, (128, 128), (direction,))
        arrived = whole._empty_like()
        unpack(gathered, shipment, arrived._planes_that_travel((direction,)))
        assert torch.equal(arrived.dequantize(direction=direction), whole.dequantize(direction=direction))


def test_directions_that_follow_from_the_other_stay_at_home():
    x = torch.randn(64, 64)
    with cg.settings.override(non_tn_fp8_gemm=False):
        transposed = cg.quantizer_for("fp8")(x)
        assert [plane.direction for plane in transposed._planes_that_travel(tuple(Direction))] == [ROWWISE]
        assert [plane.direction for plane in transposed._planes_that_travel((COLUMNWISE,))] == [COLUMNWISE]
    for name, count in (("mxfp8_2d", 1), ("nvfp4_2d", 1), ("mxfp8", 2), ("fp8", 1), ("identity", 1)):
        assert len(cg.quantizer_for(name)(x)._planes_that_travel(tuple(Direction))) == count, name


def test_other_planes_than_were_sent_are_refused():
    gathered, shipment = sent(cg.quantizer_for("mxfp8")(torch.randn(64, 64)), (32, 32))
    other = cg.quantizer_for("nvfp4")(torch.randn(64, 64))
    with pytest.raises(
        RuntimeError, match="shards have the planes rowwise mxfp8, columnwise mxfp8, but this tensor has rowwise nvfp4"
    ):
        unpack(gathered, shipment, other.planes())


def test_a_plane_without_memory_is_not_read():
    q = cg.quantizer_for("mxfp8")(torch.randn(64, 64))
    q._rowwise_data.untyped_storage().resize_(0)
    for read in (q.dequantize, q.clone, lambda: q.to(torch.bfloat16), lambda: cg.quantizer_for("mxfp8")(q)):
        with pytest.raises(RuntimeError, match="rowwise mxfp8 plane of this .64, 64. tensor has no memory"):
            read()
    assert q.dequantize(direction=COLUMNWISE).shape == (64, 64)


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("mxfp8", "fp8"), ("fp8_block_2d", "nvfp4")])
def test_a_shard_without_a_mesh_is_the_whole(pair):
    """What FSDP2 calls can be called without ranks, with the names that torch has for the arguments."""
    shard = hybrid_of(*pair)(torch.randn(128, 64))
    named = {"orig_size": shard.shape, "contiguous_orig_stride": None, "module": None, "mp_policy": None}
    buffers, gather = shard.fsdp_pre_all_gather(mesh=None, **named)
    whole, _ = shard.fsdp_post_all_gather(buffers, gather, shard.dtype)
    assert_same_bytes(whole, shard)
    assert not shard._quantizer.with_amax_reduction
    shard.quantize_(torch.randn(128, 64) * 100)
    buffers, gather = shard.fsdp_pre_all_gather(mesh=None, **named)
    for _ in range(2):  # the buffers are the caller's
        assert shard.fsdp_post_all_gather(buffers, gather, shard.dtype, out=whole)[0] is whole
        assert_same_bytes(whole, shard)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4", "fp8_block_2d", "identity"])
def test_shards_that_somebody_gathers_without_a_mesh(name, capability):
    """The bytes of two ranks, one after the other, are the tensor with the rows of both."""
    with cg.settings.override(compute_capability=capability):
        whole = cg.quantize(torch.randn(256, 64), name)
        shards = whole.split(128)
        sent = [shard.fsdp_pre_all_gather(mesh=None) for shard in shards]
        for shard, (_, gather) in zip(shards, sent, strict=True):
            gathered = torch.cat([buffer for (buffer,), _ in sent])
            found, _ = shard.fsdp_post_all_gather((gathered,), gather, shard.dtype)
            assert_same_bytes(found, whole)
