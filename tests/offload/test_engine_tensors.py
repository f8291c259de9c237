"""What becomes of each kind of tensor: stored once, given back as it was, or kept because storing frees nothing."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossgrain as cg
from crossgrain.offload.engine import Engine
from crossgrain.offload.record import Kept, Planes, Stored, Wrapped, records_of
from crossgrain.offload.store import DirectoryStore, HostStore

from ..common.quantizers import PAIRS, assert_same_bytes, hybrid_of


@pytest.fixture(params=["host", "directory"])
def engine(request, tmp_path):
    store = HostStore() if request.param == "host" else DirectoryStore(tmp_path)
    return Engine(store, min_bytes=1, prefetch=2, pending=2)


def round_trip(engine, tensor):
    packed = engine.pack(tensor)
    engine.wait()
    assert all(record.source is None for record in records_of(packed)), "nothing is read from memory"
    return packed, engine.unpack(packed)


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


STRIDED = {
    "contiguous": lambda: torch.randn(6, 8),
    "transposed": lambda: torch.randn(6, 8).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "columns": lambda: torch.randn(6, 8)[:, 2:5],
    "every other": lambda: torch.randn(6, 8)[1::2, ::3],
    "expanded": lambda: torch.randn(6, 1).expand(6, 1000),
    "expanded columns": lambda: torch.randn(6, 8)[:, 2:5].unsqueeze(0).expand(4, 6, 3),
    "windows": lambda: torch.randn(20).unfold(0, 5, 1),
    "scalar": lambda: torch.tensor(3.0),
    "in the middle": lambda: torch.randn(30)[7:19].view(3, 4),
    "bf16": lambda: torch.randn(5, 3, dtype=torch.bfloat16),
    "bool": lambda: torch.randn(5, 3) > 0,
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "float8": lambda: torch.randn(5, 3).to(torch.float8_e4m3fn),
    "packed float4": lambda: torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "nan bits": lambda: torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_bytes_and_strides_come_back(kind, engine):
    tensor = STRIDED[kind]()
    packed, back = round_trip(engine, tensor)
    assert isinstance(packed, Stored)
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.dtype.itemsize > 1 or tensor.dtype == torch.bool:
        assert torch.equal(raw(back), raw(tensor))
    else:
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    distinct = tensor.untyped_storage().nbytes()
    assert packed.layout.nbytes <= distinct, "repetitions and gaps are not stored"
    again = engine.unpack(packed)
    back.view(torch.uint8).zero_() if kind == "contiguous" else None
    assert kind != "contiguous" or (torch.equal(again, tensor) and torch.equal(engine.unpack(packed), tensor))


def test_views_of_the_same_bytes_are_stored_once(engine):
    x = torch.randn(4, 6, 8)
    packed = [engine.pack(view) for view in (x, x.view(24, 8), x.view(24, 8).t(), x.detach(), x.view(torch.uint8))]
    assert len({id(p.record) for p in packed}) == 1
    assert engine.stored_bytes == x.nbytes and engine.shared_bytes == 4 * x.nbytes
    engine.wait()
    assert torch.equal(engine.unpack(packed[2]), x.view(24, 8).t())


def test_a_changed_tensor_is_stored_again(engine):
    x = torch.randn(8)
    y = x * 1
    first = engine.pack(y)
    engine.wait()
    y.add_(1)
    second = engine.pack(y)
    engine.wait()
    assert torch.equal(engine.unpack(second), x + 1)
    with pytest.raises(RuntimeError, match=r"\[8\].*modified by an inplace operation.*version 1.*version 0"):
        engine.unpack(first)


def test_an_address_that_is_used_again_is_another_tensor(engine):
    packed, expected = [], []
    for number in range(20):
        x = torch.full((64,), float(number))
        expected.append(x.tolist())
        packed.append(engine.pack(x))
        engine.wait()  # x is freed, and the next one may lie where it was
        del x
    assert [engine.unpack(p).tolist() for p in packed] == expected


@pytest.mark.parametrize(
    "source", ["parameter", "frozen", "leaf", "view", "marked", "alias of marked", "empty", "meta"]
)
def test_what_stays_in_memory(source, engine):
    parameter = torch.nn.Parameter(torch.randn(4, 4), requires_grad=source != "frozen")
    leaf, plain = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    if "marked" in source:
        cg.mark_not_offload(plain)
    tensor = {
        "parameter": parameter,
        "frozen": parameter.t(),
        "leaf": leaf,
        "view": leaf.t(),
        "marked": plain,
        "alias of marked": plain.t().detach(),
        "empty": torch.empty(0, 4),
        "meta": torch.empty(4, 4, device="meta"),
    }[source]
    packed = engine.pack(tensor)
    assert isinstance(packed, Kept) and engine.stored_bytes == engine.kept_bytes == 0
    assert engine.unpack(packed).data_ptr() == tensor.data_ptr()


def test_fake_sparse_and_conjugate_tensors_stay(engine):
    with FakeTensorMode():
        fake = torch.empty(4, 4)
    z = torch.randn(4, dtype=torch.complex64).conj()
    for tensor in (fake, torch.eye(4).to_sparse(), z):
        packed = engine.pack(tensor)
        assert isinstance(packed, Kept)
        assert engine.unpack(packed).shape == tensor.shape
    assert torch.equal(engine.unpack(engine.pack(z)), z)


def test_small_tensors_stay(tmp_path):
    offload = cg.offload(tmp_path, min_bytes=100)
    with offload:
        (torch.ones(24, requires_grad=True) * 2).exp()
        (torch.ones(25, requires_grad=True) * 2).exp()
    assert offload.stats[:3] == (100, 0, 96)


def test_marks_do_not_pile_up():
    from crossgrain.offload import staying

    for _ in range(3000):
        cg.mark_not_offload(torch.empty(1))
    assert (
        len(staying._marked) <= staying._purge_at <= 2048 + 2 * sum(not r.expired() for r in staying._marked.values())
    )
    with pytest.raises(TypeError, match="takes tensors, got int"):
        cg.mark_not_offload(3)


# ---- quantized tensors -------------------------------------------------------------------------------


def test_quantized_tensors_go_plane_by_plane(quantizer, engine, x):
    q = quantizer(x)
    packed, back = round_trip(engine, q)
    assert isinstance(packed, Planes) and type(back) is type(q)
    assert_same_bytes(back, q)
    assert sum(record.nbytes for record in records_of(packed)) == sum(buffer.nbytes for _, buffer in q._buffers())
    assert torch.equal(back.dequantize(), q.dequantize())
    other = engine.unpack(packed)
    back.quantize_(x * 2)
    assert_same_bytes(other, q)


@pytest.mark.parametrize("row, column", PAIRS)
def test_hybrids_go_plane_by_plane(row, column, engine, x):
    q = hybrid_of(row, column)(x)
    packed, back = round_trip(engine, q)
    assert type(back) is cg.HybridQuantizedTensor
    assert_same_bytes(back, q)
    twin = engine.pack(q.detach())
    assert {id(r) for r in records_of(twin)} == {id(r) for r in records_of(packed)}, "stored once"


def test_a_write_to_a_quantized_tensor_is_noticed(engine, x):
    q = cg.quantize(x, "mxfp8")
    packed, _ = round_trip(engine, q)
    q.copy_(x * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.unpack(packed)


def test_bare_storages(engine, x):
    quantizer = hybrid_of("mxfp8", "nvfp4")
    quantizer.internal = True
    storage = quantizer(x)
    assert not isinstance(storage, torch.Tensor)
    _, back = round_trip(engine, storage)
    assert_same_bytes(back, storage)


def test_operations_that_save_quantized_tensors(x, tmp_path):
    """Ordinary operations decode them; those that save the wrapper get it back."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values, q):
            ctx.save_for_backward(q)
            return values * q.dequantize()

        @staticmethod
        def backward(ctx, dy):
            (q,) = ctx.saved_tensors
            return dy * q.dequantize(), None

    values = torch.randn(x.shape, requires_grad=True)
    q = hybrid_of("mxfp8", "nvfp4")(x)
    plain = torch.autograd.grad(Keeps.apply(values, q).sum(), values)
    with cg.offload(tmp_path, min_bytes=0) as offload:
        y = Keeps.apply(values, q)
    offload.wait()
    assert torch.equal(torch.autograd.grad(y.sum(), values)[0], plain[0])
    assert offload.stats.stored == sum(buffer.nbytes for _, buffer in q._buffers())


def test_wrappers_of_others(engine):
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    packed, back = round_trip(engine, two)
    assert isinstance(packed, Wrapped) and len(records_of(packed)) == 2
    assert type(back) is TwoTensor and torch.equal(back.a, two.a) and torch.equal(back.b, two.b)


def test_graphs_hold_no_cycle(tmp_path):
    """An output that its own operation saves is freed with the graph, without the collector."""
    gc.collect()
    gc.disable()
    try:
        for min_bytes in (0, 1 << 20):
            offload = cg.offload(tmp_path, min_bytes=min_bytes)
            with offload:
                y = torch.randn(100, requires_grad=True).exp()
            offload.wait()
            node = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
            del y
            assert node.expired() and offload.stats.used == 0
    finally:
        gc.enable()
