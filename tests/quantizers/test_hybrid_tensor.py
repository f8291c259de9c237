"""The hybrid tensor: every operation child by child, and what must hold for both children together."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE

from ..common.quantizers import PAIRS, assert_same_bytes, buffers_of, hybrid_of

DIRECTIONS = [ROWWISE, COLUMNWISE]
TRANSPOSING = [names for names in PAIRS if any(name.startswith("fp8") and "block" not in name for name in names)]


@pytest.fixture(
    params=[pytest.param((names, True), id="-".join(names)) for names in PAIRS]
    + [pytest.param((names, False), id="-".join(names) + "-transposing") for names in TRANSPOSING]
)
def h(request):
    names, one_buffer = request.param
    with cg.settings.override(non_tn_fp8_gemm=one_buffer):
        yield hybrid_of(*names)


def unchanged(q, before):
    return all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def assert_decodes_like(q, other, shape=None):
    for direction in DIRECTIONS:
        expected = other.dequantize(direction=direction)
        assert torch.equal(q.dequantize(direction=direction), expected if shape is None else expected.view(shape))


# ---- what it is ----------------------------------------------------------------------------------------


def test_reports_shape_dtype_device_of_the_input(h, x):
    q = h(x.clone())
    assert (q.shape, q.dtype, q.device) == (x.shape, x.dtype, x.device)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    assert type(q.rowwise_sub_storage) is h.rowwise_quantizer._tensor_class
    assert type(q.columnwise_sub_storage) is h.columnwise_quantizer._tensor_class
    for shown in (type(q.rowwise_sub_storage).__name__, type(q.columnwise_sub_storage).__name__, "bfloat16"):
        assert shown in repr(q)
    assert torch.equal(q.dequantize(), q.rowwise_sub_storage.dequantize())
    for name in ("rowwise_sub_storage", "columnwise_sub_storage"):
        with pytest.raises(AttributeError):
            setattr(q, name, None)


def test_storages_have_storages_as_children(h, x):
    seed = torch.get_rng_state()
    tensor = h(x.clone())
    torch.set_rng_state(seed)
    h.internal = True
    storage = h(x.clone())
    assert not isinstance(storage, torch.Tensor)
    assert not isinstance(storage.rowwise_sub_storage, torch.Tensor)
    assert_same_bytes(storage, tensor)
    assert (storage.size(), storage.size(-1), storage.device) == (x.shape, 256, x.device)
    rebuilt = type(storage)(**storage.get_metadata())
    assert set(storage.get_metadata()) == {
        "rowwise_storage",
        "columnwise_storage",
        "quantizer",
        "fake_dtype",
    }
    assert_same_bytes(rebuilt, storage)
    assert_same_bytes(storage.view(2, 64, 256).view(128, 256), storage)
    storage.rowwise_sub_storage.clear()
    if not isinstance(storage.rowwise_sub_storage, cg.IdentityTensorStorage):
        assert torch.equal(storage.dequantize(), tensor.dequantize(direction=COLUMNWISE)), "what is left is decoded"


def test_built_by_hand(x):
    """Children that were quantized one after the other belong together when they are put together."""
    row, column = cg.quantize(x, "mxfp8", columnwise=False), cg.quantize(x, "nvfp4", rowwise=False)
    row.quantize_(x)
    assert cg.HybridQuantizedTensorStorage(row, column, None).columnwise_sub_storage is column
    column.quantize_(x)
    for a, b in ((row, column), (None, column), (row, None)):
        q = cg.HybridQuantizedTensor(x.shape, x.dtype, rowwise_storage=a, columnwise_storage=b)
        assert q.get_usages() == {"rowwise": a is not None, "columnwise": b is not None}
        assert q.dequantize().shape == x.shape
    q = cg.HybridQuantizedTensorStorage(row, column, None, x.dtype)
    q.quantize_(x * 2)
    assert torch.equal(q.dequantize(), cg.quantize(x * 2, "mxfp8").dequantize())
    with pytest.raises(TypeError, match="two children, got MXFP8Quantizer"):
        cg.HybridQuantizedTensorStorage(row, column, row._quantizer)
    with pytest.raises(TypeError, match="storage of one format, got HybridQuantizedTensorStorage"):
        cg.HybridQuantizedTensorStorage(q, column, None)
    with pytest.raises(TypeError, match="storage of one format, got Tensor"):
        cg.HybridQuantizedTensorStorage(x, column, None)
    with pytest.raises(RuntimeError):
        cg.HybridQuantizedTensorStorage(row, cg.quantize(x[:64], "nvfp4"), None)
    with pytest.raises(ValueError, match="needs shape=..."):
        cg.HybridQuantizedTensorStorage(None, None, q._get_quantizer())
    with pytest.raises(TypeError, match="requires a parent HybridQuantizer, with two children, got NoneType"):
        cg.HybridQuantizedTensorStorage(None, None, None)
    with pytest.raises(TypeError, match="requires a parent HybridQuantizer"):
        cg.HybridQuantizedTensor(x.shape, x.dtype, rowwise_storage=None, columnwise_storage=None, quantizer=None)


def test_repr_names_both_directions(h, x):
    q = h(x)
    q.update_usage(rowwise_usage=False)
    assert "rowwise=None, columnwise=" in repr(q)
    q.update_usage(columnwise_usage=False)
    assert "rowwise=None, columnwise=None" in repr(q)


@pytest.mark.parametrize("rows, columns", [("mxfp8", "nvfp4"), ("fp8", "mxfp8"), ("mxfp8", "identity")])
def test_columns_that_are_made_from_the_rows_are_made_again(rows, columns, x, monkeypatch):
    q = hybrid_of(rows, columns, "rowwise_dequantized")(x)
    whole = q.clone()
    q.update_usage(columnwise_usage=False)
    q.quantize_(2 * x)
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    whole.quantize_(2 * x)
    assert_same_bytes(q, whole)
    q.quantize_(x)
    assert_same_bytes(q, whole.quantize_(x))
    q.update_usage(columnwise_usage=False)
    monkeypatch.setattr(cg.settings, "strict", True)
    with pytest.raises(
        RuntimeError, match=r"columnwise usage requested.* It was dropped \(update_usage\), as Megatron-FSDP"
    ):
        q.update_usage(columnwise_usage=True)


def test_codes_that_replace_freed_ones_are_a_write(x):
    """A sharding wrapper frees the memory of the codes and gathers them elsewhere; what was there is not read."""
    q = hybrid_of("mxfp8", "nvfp4")(x)
    moved = q._rowwise_data.clone()
    q._rowwise_data = moved
    assert q.columnwise_sub_storage is not None and not q._is_stale(COLUMNWISE)
    moved.untyped_storage().resize_(0)
    q._rowwise_data = torch.zeros(moved.shape, dtype=moved.dtype)
    assert q._is_stale(COLUMNWISE)


def test_usages_are_only_dropped_and_all_at_once(h, x):
    q = h(x.clone())
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    q.update_usage(columnwise_usage=False)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="columnwise usage requested"):
        q.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}, "a refused request changes nothing"
    q.update_usage(rowwise_usage=False)
    with pytest.raises(RuntimeError, match="does not hold any data"):
        q.dequantize()
    with pytest.raises(RuntimeError, match="has no planes to write to"):
        q.quantize_(x)


@pytest.mark.parametrize("shape", [(0, 256), (128, 0), (1, 256), (3, 128), (2, 64, 128), (5,), ()])
def test_edge_shapes_behave_as_the_children_do(h, shape):
    values = torch.randn(shape)
    errors = []
    for direction in DIRECTIONS:
        try:
            h.child(direction)(values.clone())
        except ValueError as error:
            errors.append(str(error))
    if errors:
        with pytest.raises(ValueError, match="shape") as caught:
            h(values)
        assert str(caught.value) in errors
        return
    q = h(values.clone())
    assert q.shape == values.shape
    for direction in DIRECTIONS:
        assert q.dequantize(direction=direction).shape == values.shape
    q.quantize_(values)
    assert q.clone().detach().view(-1).shape == (values.numel(),)


# ---- views ---------------------------------------------------------------------------------------------


def test_detached_children_are_other_objects_over_the_same_buffers(h, x):
    q = h(x.clone())
    for alias in (q.detach(), q.data, q.view_as(q), type(q).make_like(q), nn.Parameter(q)):
        assert alias._rowwise_storage is not q._rowwise_storage
        assert alias._columnwise_storage is not q._columnwise_storage
        assert all(a.data_ptr() == b.data_ptr() for (_, a), (_, b) in zip(alias._buffers(), q._buffers(), strict=True))
        alias.detach().prepare_for_saving()
        alias.detach().update_usage(rowwise_usage=False)
        assert_same_bytes(alias.detach(), q)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}


def test_views(h, x):
    q = h(x.clone())
    for shape in ((2, 64, 256), (-1,), (128, 256)):
        assert type(q.view(shape)) is type(q)
        assert_decodes_like(q.view(shape), q, shape)
        assert_same_bytes(q.view(shape).view(128, 256), q)
    assert type(q).make_like(q, shape=(4, 32, 256)).dequantize().shape == (4, 32, 256)
    assert q.contiguous() is q
    seed = torch.get_rng_state()
    q.view(-1).copy_((x * 2).view(-1))
    torch.set_rng_state(seed)
    assert_same_bytes(q, h((x * 2).clone()))


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_flat_views_of_one_child_are_written(x, source):
    for names in (("mxfp8", "nvfp4"), ("mxfp8", "identity"), ("identity", "nvfp4")):
        h = hybrid_of(*names, source)
        h.set_usage(rowwise=False)
        q = h(x.clone())
        if source == "rowwise_dequantized" and names[1] == "identity":
            with pytest.raises(ValueError, match="1 dimensions"):  # nobody knows the rows of the transient row
                q.view(-1).copy_((x * 2).view(-1))
            continue
        q.view(-1).copy_((x * 2).view(-1))
        assert_same_bytes(q, h((x * 2).clone()))


def test_splits_and_slices(h, x):
    q = h(torch.cat((x, x * 2, x * 3)))
    for direction in DIRECTIONS:
        whole = q.dequantize(direction=direction)
        for piece, expected in zip(q.split(128), whole.split(128), strict=True):
            assert type(piece) is type(q)
            assert torch.equal(piece.dequantize(direction=direction), expected)
        assert torch.equal(q[128:256].dequantize(direction=direction), whole[128:256])
        assert torch.equal(q[:, 128:].dequantize(direction=direction), whole[:, 128:])
    assert_same_bytes(q[:], q)


def test_a_cut_that_one_child_cannot_take_is_decoded(x):
    q = hybrid_of("mxfp8", "nvfp4")(x)
    for piece, expected, why in (
        (q.split(24)[1], q.dequantize().split(24)[1], "columnwise nvfp4 plane can only be cut at multiples of 16"),
        (q[:, :16], q.dequantize()[:, :16], "rowwise mxfp8 plane can only be cut at multiples of 32"),
    ):
        assert torch.equal(piece, expected)
        with pytest.raises(RuntimeError, match=why):
            piece.zero_()
    assert q[16:].shape == (112, 256)


def test_as_strided_goes_by_the_strides_of_the_hybrid(h, x):
    """An identity child may lie elsewhere in its memory, or in another order."""
    whole = h(torch.cat((x, x * 2)))
    part = whole[128:]
    for q in (whole, part, h(x.float().t().contiguous().t().to(x.dtype))):
        assert_decodes_like(q.as_strided(q.shape, q.stride()), q)
    assert_decodes_like(whole.as_strided((128, 256), (256, 1), 128 * 256), part)
    with pytest.raises(RuntimeError, match="out of bounds"):
        whole.as_strided((128, 256), (256, 1), 129 * 256)
    for place in (((128, 256), (512, 1), 0), ((256, 256), (1, 256), 0), ((128, 256), (256, 1), 7)):
        assert torch.equal(whole.as_strided(*place), whole.dequantize().as_strided(*place))


# ---- copies --------------------------------------------------------------------------------------------


def saved_and_loaded(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def test_copies_have_buffers_of_their_own(h, x):
    q = nn.Parameter(h(x.clone()))
    before = buffers_of(q)
    copies = (q.detach().clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), saved_and_loaded(q), q.cpu().clone())
    for made in copies:
        assert_same_bytes(made.detach(), q.detach())
        assert type(made._quantizer) is type(q._quantizer)
        with torch.no_grad():
            made.quantize_(x * 2)
            made.mul_(2)
    assert unchanged(q, before)
    assert isinstance(copies[1], nn.Parameter)
    assert isinstance(copies[3], nn.Parameter)
    assert saved_and_loaded(q, map_location="meta").device.type == "meta"


def test_a_pickled_slice_does_not_carry_the_rest(h, x):
    part = h(torch.cat((x, x * 2)))[128:]
    assert_same_bytes(saved_and_loaded(part), part)
    assert len(pickle.dumps(part)) < 0.7 * len(pickle.dumps(h(torch.cat((x, x * 2)))))


def test_a_deep_copy_has_delayed_scaling_state_of_its_own(x):
    h = hybrid_of("fp8_delayed", "fp8_delayed")
    q = h(x)
    seen = h.rowwise_quantizer.amax.clone()
    twins = copy.deepcopy([q, q])
    assert twins[0] is twins[1]
    twins[0].quantize_(x * 100)
    twins[0].rowwise_sub_storage.quantize_(x * 100)
    assert torch.equal(h.rowwise_quantizer.amax, seen)


def test_state_dicts(h, x):
    source, target = nn.Module(), nn.Module()
    source.weight, target.weight = nn.Parameter(h(x.clone())), nn.Parameter(h(x * 2))
    target.load_state_dict(source.state_dict())
    assert_same_bytes(target.weight, source.weight)


def test_copy_between_hybrids_copies_bytes(h, x):
    q, src = h(x.clone()), h(x * 2)
    q.copy_(src)
    assert_same_bytes(q, src)
    q, src = h(x.clone()), h(x * 2)
    q.copy_from_storage(src)
    assert_same_bytes(q, src)
    with pytest.raises(TypeError, match="copy_from_storage"):
        q.copy_from_storage(src.rowwise_sub_storage)


@pytest.mark.parametrize("kept", DIRECTIONS, ids=lambda d: d.value)
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_copy_from_a_hybrid_with_one_child_leaves_none_behind(x, kept, source):
    h = hybrid_of("nvfp4", "mxfp8", source)
    q, src = h(x), h(x * 2)
    src.update_usage(**{f"{kept.other.value}_usage": False})
    q.copy_(src)
    if kept is ROWWISE or source == "original":
        assert torch.equal(q.dequantize(direction=kept), src.dequantize())
    if source == "rowwise_dequantized":
        derived = cg.quantize(q.dequantize(), "mxfp8").dequantize(direction=COLUMNWISE)
        assert torch.equal(q.dequantize(direction=COLUMNWISE), derived)
    for direction in DIRECTIONS:
        error = (q.dequantize(direction=direction) - x * 2).float().norm() / (x * 2).float().norm()
        assert error < 0.2
    src.copy_(h(x * 5))
    assert src.get_usages() == {kept.value: True, kept.other.value: False}
    assert (src.dequantize() - x * 5).float().norm() / (x * 5).float().norm() < 0.2


def test_copy_between_other_tensors(h, x):
    q = h(x.clone())
    seed = torch.get_rng_state()
    q.copy_(x * 2)
    torch.set_rng_state(seed)
    assert_same_bytes(q, h((x * 2).clone()))
    plain = torch.empty(128, 256)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize().float())
    mx = cg.quantize(x, "mxfp8")
    mx.copy_(hybrid_of("mxfp8", "nvfp4")(x * 2))
    assert torch.equal(mx.dequantize(), cg.quantize(x * 2, "mxfp8").dequantize())
    q.copy_(cg.quantize(-x, "mxfp8"))
    assert (q.dequantize() + x).float().norm() / x.float().norm() < 0.2


def test_casts_and_moves(h, x):
    q = h(x.clone())
    module = nn.Module()
    module.weight = nn.Parameter(q)
    module.to(torch.float16)
    assert (module.weight.dtype, module.weight.dequantize().dtype) == (torch.float16, torch.float16)
    assert isinstance(module.weight, cg.HybridQuantizedTensor)
    assert unchanged(module.weight, buffers_of(q))
    assert q.to("meta").device.type == "meta"
    module.to("meta").to_empty(device="cpu")
    module.weight.data.copy_(x)
    assert (module.weight.dequantize().float() - x.float()).norm() / x.float().norm() < 0.2
    assert torch.equal(q.to(torch.int32), q.dequantize().to(torch.int32))
    q.dtype = torch.float32
    assert q.dequantize().dtype == torch.float32
    assert h.quantize(x, dtype=torch.float32).columnwise_sub_storage.dtype == torch.float32


def test_allocation(h, x):
    q = h(x.clone())
    zeros = q.new_zeros((256, 128))
    assert type(zeros) is type(q)
    for direction in DIRECTIONS:
        assert (zeros.dequantize(direction=direction) == 0).all()
    assert q.new_zeros((128, 128), device="meta").device.type == "meta"
    assert q.new_empty((256, 256)).shape == (256, 256)
    q.update_usage(rowwise_usage=False)
    like = torch.empty_like(q)
    assert like.get_usages() == like._quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    assert q._quantizer.rowwise_usage, "the quantizer of the new one is its own"
    assert type(torch.zeros_like(q)) is torch.Tensor
    assert torch.empty_like(q.view(-1)).shape == (x.numel(),)


def test_padding_a_shard(h, x):
    """How FSDP2 pads: zeros like the shard, a slice of them, copy_."""
    shard = h(x.clone())
    padded = shard.new_zeros((256, 256))
    padded[:128].copy_(shard)
    for direction in DIRECTIONS:
        decoded = padded.dequantize(direction=direction)
        assert torch.equal(decoded[:128], shard.dequantize(direction=direction))
        assert (decoded[128:] == 0).all()


def test_data_can_be_assigned(h, x):
    q, other = nn.Parameter(h(x.clone())), h(x * 2)
    q.data = other
    assert_same_bytes(q, other)
    assert q._rowwise_storage is not other._rowwise_storage
    seed = torch.get_rng_state()
    q.data = x * 3
    torch.set_rng_state(seed)
    assert_same_bytes(q, h((x * 3).clone()))
    before = buffers_of(q)
    for wrong, error in ((x[:64], RuntimeError), (cg.quantize(x, "mxfp8"), TypeError)):
        with pytest.raises(error):
            q.data = wrong
    assert unchanged(q, before)


@pytest.mark.parametrize("rows", [64, 128])
def test_data_cannot_be_assigned_where_no_plane_could_take_it(x, rows):
    q = hybrid_of("mxfp8", "nvfp4")(x)
    q.update_usage(rowwise_usage=False, columnwise_usage=False)
    with pytest.raises(RuntimeError, match="has no planes, so a tensor that is assigned to its data would be lost"):
        q.data = x[:rows].clone()
    assert q.shape == x.shape


# ---- writing, saving -----------------------------------------------------------------------------------


def test_mutating_operations_write_every_child(h, x):
    q = h(x.clone())
    writes = (lambda: q.fill_(2.0), lambda: torch._foreach_add_([q], 1.0), lambda: q.__setitem__(slice(None), 4.0))
    for write, value in zip(writes, (2.0, 3.0, 4.0), strict=True):
        write()
        for direction in DIRECTIONS:
            assert torch.allclose(q.dequantize(direction=direction).float(), torch.tensor(value), rtol=0.15)
    for refused in (lambda: q.t_(), lambda: q[3].fill_(0), lambda: q.t().zero_(), lambda: q.share_memory_()):
        with pytest.raises(RuntimeError):
            refused()


def test_writes_are_noticed_by_autograd(h, x):
    """Operations save the tensor or its buffers: both must know of every write."""
    a = torch.randn(128, 256, requires_grad=True)
    writes = (
        lambda w: w.quantize_(x * 2),
        lambda w: w.detach().copy_(h(x * 2)),
        lambda w: w.view(-1).quantize_((x * 2).view(-1)),
        lambda w: setattr(w, "data", x * 2),
    )
    for write in writes:
        w = h(x.clone())
        versions = [buffer._version for _, buffer in w._buffers()]
        loss = (a * w).sum()
        write(w)
        assert all(buffer._version > old for (_, buffer), old in zip(w._buffers(), versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_saving_for_backward(h, x):
    q = h(x.clone())
    before = buffers_of(q)
    flat, objects = cg.prepare_for_saving(q, torch.ones(3))
    assert q.get_usages() == {"rowwise": False, "columnwise": False}
    assert not any(isinstance(tensor, cg.QuantizedTensorStorage) for tensor in flat)
    with pytest.raises(RuntimeError, match="buffers, but only"):
        q.restore_from_saved(flat[:-2])  # the last is not ours: one is missing
    assert q.get_usages() == {"rowwise": False, "columnwise": False}
    q.update_usage(columnwise_usage=False)  # its buffers are in the list all the same
    restored, rest = cg.restore_from_saved(objects, flat, return_saved_tensors=True)
    assert restored[0] is q
    assert torch.equal(restored[1], torch.ones(3))
    assert rest == []
    assert unchanged(q, before)


def test_shards_concatenate_to_the_whole(h, x):
    q = h(torch.cat((x, x * 2, x * 3)))
    shards = [piece.fsdp_extract_buffers() for piece in q.split(128)]
    meta = shards[0][1]
    assert meta["field_names"] == q.fsdp_buffer_fields()
    assert len(set(meta["field_names"])) == len(shards[0][0])
    gathered = [torch.cat(buffers) for buffers in zip(*(buffers for buffers, _ in shards), strict=True)]
    whole = torch.empty_like(q)
    whole.fsdp_assign_gathered(gathered, meta)
    assert_same_bytes(whole, q)
    before = buffers_of(whole)
    zeros = [torch.zeros_like(buffer) for buffer in gathered]
    for wrong in (zeros[:-1], [*zeros[:-1], zeros[-1][:1]]):
        with pytest.raises(RuntimeError, match=r"gathered buffers for|it should be"):
            whole.fsdp_assign_gathered(wrong, meta)
    assert unchanged(whole, before)
    q.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="other directions"):
        q.fsdp_assign_gathered(gathered, meta)


def test_flatten_and_unflatten(h, x):
    q = h(x.clone())
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    assert all(isinstance(child, torch.Tensor) for child in inner.values())
    assert_same_bytes(type(q).__tensor_unflatten__(inner, context, q.shape, q.stride()), q)


def test_clear_frees_both(h, x):
    q = h(x.clone())
    q.clear()
    q.clear()
    assert q.get_usages() == {"rowwise": False, "columnwise": False}


def test_data_tensors_are_those_of_both_children(x):
    q = hybrid_of("mxfp8", "nvfp4")(x)
    rows, columns = q.rowwise_sub_storage, q.columnwise_sub_storage
    assert len(q.get_data_tensors()) == 4
    pairs = zip(q.get_data_tensors(), (*rows.get_data_tensors(), *columns.get_data_tensors()), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    assert q.get_data_tensors(columnwise_data=False) is rows.plane(ROWWISE).data
    assert q.get_data_tensors(rowwise_data=False) is columns.plane(COLUMNWISE).data
    q.update_usage(columnwise_usage=False)
    assert len(q.get_data_tensors()) == 2
    assert q.get_data_tensors(rowwise_data=False) is None
