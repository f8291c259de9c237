"""What torch operations do with quantized tensors: views, copies, allocation, everything else."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, DType

from .quantizers import QUANTIZERS, assert_same_bytes, buffers_of

BLOCK_NAMES = [fmt.name for fmt in cg.formats.formats() if fmt.block is not None]


def is_identity(tensor):
    return isinstance(tensor, cg.IdentityTensor)


# ---- views -------------------------------------------------------------------------------------------


def test_detach_and_alias_share_buffers(quantizer, x):
    q = quantizer(x.clone())
    for alias in (q.detach(), q.view_as(q), q.data):
        assert alias is not q
        assert_same_bytes(alias, q)
        for (_, mine), (_, theirs) in zip(alias._buffers(), q._buffers(), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()


def test_view_keeps_the_bytes(quantizer, x):
    q = quantizer(x.clone())
    for shape in ((2, 64, 256), (4, 4, 8, 256), (-1, 256), (2, -1, 256)):
        viewed = q.view(shape)
        assert type(viewed) is type(q)
        assert viewed.shape == x.view(shape).shape
        for direction in cg.Direction:
            assert torch.equal(viewed.dequantize(direction=direction), q.dequantize(direction=direction).view(shape))
        assert_same_bytes(viewed.reshape(128, 256), q)


def test_flat_view_is_still_quantized(quantizer, x):
    """FSDP2 takes view(-1) of every parameter and must get the subclass back."""
    q = quantizer(x.clone())
    flat = q.view(-1)
    assert type(flat) is type(q)
    assert flat.shape == (x.numel(),)
    assert torch.equal(flat.dequantize(), q.dequantize().view(-1))
    assert_same_bytes(flat.view(128, 256), q)
    assert torch.empty_like(flat).shape == flat.shape
    assert_same_bytes(flat.clone().view(128, 256), q)
    assert torch.equal(type(q).make_like(flat).dequantize(), flat.dequantize())
    seed = torch.get_rng_state()
    with torch.no_grad():
        flat.copy_((x * 2).view(-1))  # writes through
    torch.set_rng_state(seed)
    assert_same_bytes(q, quantizer((x * 2).clone()))


def test_view_that_breaks_blocks_is_refused(x):
    for name in ("mxfp8", "nvfp4", "fp8_block", "mxfp6_e2m3"):
        q = cg.quantize(x, name)
        with pytest.raises(RuntimeError, match=r"cannot view \[128, 256\] as \[256, 128\]"):
            q.view(256, 128)
        storage = cg.quantizer_for(name)
        storage.internal = True
        with pytest.raises(RuntimeError, match="last dimension"):
            storage(x).view(256, 128)
        assert storage(x).view(2, 64, 256).shape == (2, 64, 256)


def test_a_view_of_a_wrong_size_is_refused(quantizer, x):
    with pytest.raises(RuntimeError):
        quantizer(x.clone()).view(100, 256)


def test_split_is_quantizing_the_pieces_with_the_scales_of_the_whole(quantizer, x):
    q = quantizer(torch.cat((x, x)))
    pieces = q.split(128)
    assert [piece.shape for piece in pieces] == [(128, 256)] * 2
    for direction in cg.Direction:
        whole = q.dequantize(direction=direction)
        for piece, expected in zip(pieces, whole.split(128), strict=True):
            assert type(piece) is type(q)
            assert torch.equal(piece.dequantize(direction=direction), expected)


def test_splits_of_three_dimensions_and_uneven_sizes(quantizer):
    q = quantizer(torch.randn(5, 128, 128))
    sizes = (1, 3, 1)
    for direction in cg.Direction:
        whole = q.dequantize(direction=direction)
        for piece, expected in zip(q.split_with_sizes(sizes), whole.split_with_sizes(sizes), strict=True):
            assert torch.equal(piece.dequantize(direction=direction), expected)
        for piece, expected in zip(q.split(2), whole.split(2), strict=True):
            assert torch.equal(piece.dequantize(direction=direction), expected)
    with pytest.raises(ValueError, match="do not add up"):
        torch.ops.aten.split_with_sizes(q, [1, 1])


def test_slices_along_the_last_dimension(quantizer):
    q = quantizer(torch.randn(2, 128, 384))
    for direction in cg.Direction:
        part = q[:, :, 128:256]
        assert type(part) is type(q)
        assert torch.equal(part.dequantize(direction=direction), q.dequantize(direction=direction)[:, :, 128:256])
    assert torch.equal(q[..., -128:].dequantize(), q.dequantize()[..., -128:])


def test_columnwise_only_fp8_splits_into_pieces_of_the_right_shape(x):
    """The pieces of a transposed buffer [K, M] are [M / n, K], not its own shape."""
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = cg.quantize(x, "fp8", rowwise=False)
        assert q._data is None
        for piece, expected in zip(q.split(32), q.dequantize().split(32), strict=True):
            assert piece.shape == (32, 256)
            assert piece._transpose.shape == (256, 32)
            assert torch.equal(piece.dequantize(), expected)


@pytest.mark.parametrize(
    ("name", "direction", "cut", "multiple"),
    [
        ("mxfp8", COLUMNWISE, slice(0, 33), 32),
        ("nvfp4", COLUMNWISE, slice(8, 128), 16),
        ("fp8_block", COLUMNWISE, slice(0, 64), 128),
        ("fp8_block_2d", ROWWISE, slice(64, 128), 128),
        ("mxfp6_e2m3", COLUMNWISE, slice(0, 48), 32),
        ("nvfp4_2d", ROWWISE, slice(0, 24), 16),
    ],
)
def test_a_cut_inside_a_block_is_refused_naming_the_boundary(x, name, direction, cut, multiple):
    q = cg.quantize(torch.cat((x, x)), name)
    with pytest.raises(ValueError, match=rf"{direction.value} {name} plane .* multiples of {multiple} along M"):
        q[cut]
    with pytest.raises(ValueError, match="multiples of .* along K"):
        q[:, 8:256]


def test_a_rowwise_plane_can_be_cut_between_any_rows(x):
    for name in ("mxfp8", "nvfp4", "fp8_block", "nvfp4_row_scaled"):
        q = cg.quantize(x, name, columnwise=False)
        assert torch.equal(q[5:12].dequantize(), q.dequantize()[5:12])


def test_slices_that_need_other_than_blocks_are_refused(x):
    q = cg.quantize(x.view(2, 64, 256), "mxfp8")
    with pytest.raises(ValueError, match="not along dimension 1"):
        q[:, 0:32]
    with pytest.raises(ValueError, match="step 2"):
        q[::2]
    with pytest.raises(ValueError, match="can be cut"):
        q.view(-1)[0:32]


def test_a_full_slice_is_an_alias(quantizer, x):
    q = quantizer(x.clone())
    assert_same_bytes(q[:], q)
    assert_same_bytes(q[0:1000], q)
    assert not q[:]._cut_axes


def test_as_strided(quantizer, x):
    q = quantizer(torch.cat((x, x)))
    assert_same_bytes(q.as_strided(q.shape, q.stride()), q)
    lower = q.as_strided((128, 256), (256, 1), 128 * 256)
    assert torch.equal(lower.dequantize(), q.dequantize()[128:])
    if not is_identity(q):
        for size, stride, offset in (((128, 256), (512, 1), 0), ((256, 256), (1, 256), 0), ((128, 256), (256, 1), 7)):
            with pytest.raises(ValueError, match="not a run of its first dimension"):
                q.as_strided(size, stride, offset)


def test_writing_to_a_slice_writes_the_whole_or_is_refused(quantizer, x):
    """A slice shares its buffers; a scale of the whole tensor must not change under the rest."""
    q = quantizer(torch.cat((x, x)).clone())
    before = q.dequantize()
    part = q[:128]
    shared = any(p.format.block is None or p.format.global_amax for p in q.planes()) and not is_identity(q)
    versions = [buffer._version for _, buffer in q._buffers()]
    with torch.no_grad():
        if shared:
            with pytest.raises(RuntimeError, match="shares its per-tensor"):
                part.copy_(x * 2)
            assert torch.equal(q.dequantize(), before)
        else:
            part.copy_(x * 2)
            assert torch.equal(q.dequantize()[:128], part.dequantize())
            assert torch.equal(q.dequantize()[128:], before[128:])
            assert all(buffer._version > old for (_, buffer), old in zip(q._buffers(), versions, strict=True))


def test_bytes_under_the_same_scale_can_be_copied_into_a_slice(quantizer, x):
    """How FSDP2 pads a shard: zeros like the shard, a slice of them, copy_."""
    shard = quantizer(x.clone())
    padded = shard.new_zeros((256, 256))
    padded[:128].copy_(shard)
    for direction in cg.Direction:
        decoded = padded.dequantize(direction=direction)
        assert torch.equal(decoded[:128], shard.dequantize(direction=direction))
        assert (decoded[128:] == 0).all()


def test_a_change_of_format_reaches_every_alias(x):
    """New bytes under an old format would be read as other numbers."""
    p = nn.Parameter(cg.quantize(x, "mxfp8"))
    alias = p.detach()
    with pytest.warns(UserWarning, match="replaced"):
        p.update_quantizer(cg.MXFP8Quantizer(DType.kFloat8E5M2))
    clone = p.detach().clone()
    expected = clone.dequantize()
    p.data.copy_(x * 2)
    for tensor in (p, alias, p.data, type(p).make_like(p)):
        assert tensor._fp8_dtype == DType.kFloat8E5M2
        assert_same_bytes(tensor, cg.quantize(x * 2, "mxfp8_e5m2"))
    assert torch.equal(clone.dequantize(), expected), "a clone is not an alias"


def test_a_slice_cannot_change_the_format_of_its_tensor(x):
    for name, quantizer in (
        ("mxfp8", cg.MXFP8Quantizer(DType.kFloat8E5M2)),
        ("fp8_block", cg.quantizer_for("fp8_block_2d")),
    ):
        w = cg.quantize(torch.cat((x, x)), name)
        before = buffers_of(w)
        part = w[:128]
        with pytest.raises(ValueError, match=f"made for {name} and cannot hold"):
            quantizer.update_quantized(x, part)
        assert all(torch.equal(buffer, before[field]) for field, buffer in w._buffers())


def test_writing_one_slice_does_not_freshen_the_rest(x):
    w = cg.quantize(x, "mxfp8")
    upper = w[:64]
    upper.update_usage(columnwise_usage=False)
    upper.copy_(x[:64] * 2)
    w[64:].quantize_(x[64:] * 2)
    with pytest.raises(RuntimeError, match="columnwise .* stale"):
        w.dequantize(direction=COLUMNWISE)


def test_overlapping_parts_copy_as_if_apart():
    for name in (*BLOCK_NAMES, "nvfp4_2d"):
        for usages in ({}, {"rowwise": False}, {"columnwise": False}):
            w = cg.quantize(torch.randn(384, 128), name, **usages)
            source = w[0:256].clone()
            w[128:384].copy_(w[0:256])
            assert_same_bytes(w[128:384].clone(), source)


def test_inference_mode(quantizer, x):
    """Aliases of a normal tensor stay normal, and tensors made for inference are usable."""
    q = quantizer(x.clone())
    with torch.inference_mode():
        for alias in (q.detach(), q.data, q.view(-1), q[:], nn.Parameter(q), q.split(128)[0]):
            assert torch.equal(alias.dequantize().view(-1), q.dequantize().view(-1))
            assert not alias.is_inference()
        made = quantizer(x.clone())
        made.quantize_(x)
        assert made.detach().is_inference()
    assert made.dequantize().shape == x.shape


# ---- copies ------------------------------------------------------------------------------------------


def test_clone_has_buffers_of_its_own(quantizer, x):
    q = quantizer(x.clone())
    clone = q.clone()
    assert_same_bytes(clone, q)
    for (name, mine), (_, theirs) in zip(clone._buffers(), q._buffers(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr(), name
        assert mine.shape == theirs.shape


def test_clone_of_a_slice_is_whole_again(quantizer, x):
    part = quantizer(torch.cat((x, x)).clone())[128:]
    clone = part.clone()
    assert not clone._cut_axes
    assert_same_bytes(clone, part)
    fresh = quantizer(x.clone())
    for (_, mine), (_, theirs) in zip(clone._buffers(), fresh._buffers(), strict=True):
        assert mine.shape == theirs.shape
    with torch.no_grad():
        clone.copy_(x)


def test_copy_between_equal_formats_copies_bytes(quantizer, x):
    q, src = quantizer(x.clone()), quantizer((x * 2).clone())
    with torch.no_grad():
        q.copy_(src)
    assert_same_bytes(q, src)


def test_copy_from_plain_requantizes_and_casts(quantizer, x):
    q = quantizer(x.clone())
    for src in ((x * 2), (x * 2).float(), (x * 2).double(), torch.ones(256, dtype=torch.int64)):
        seed = torch.get_rng_state()
        q.copy_(src)
        torch.set_rng_state(seed)
        high = src if src.dtype in (torch.bfloat16, torch.float32) else src.to(torch.bfloat16)
        if not is_identity(q):
            assert_same_bytes(q, quantizer(high.expand(128, 256).clone()))


def test_copy_to_plain_dequantizes(quantizer, x):
    q = quantizer(x.clone())
    plain = torch.empty(128, 256)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize().float())


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if "sr" not in name and "identity" not in name])
def test_copy_between_different_usages_leaves_no_plane_behind(name, x):
    """A plane that the source lacks is made from its values: it must not keep its old bytes."""
    quantizer = QUANTIZERS[name]()
    both = quantizer(x.clone())
    quantizer.set_usage(columnwise=False)
    rowwise = quantizer((x * 2).clone())
    both.copy_(rowwise)
    assert torch.equal(both.dequantize(), rowwise.dequantize())
    error = (both.dequantize(direction=COLUMNWISE).float() - (x * 2).float()).norm() / (x * 2).float().norm()
    assert error < 0.25
    rowwise.copy_(quantizer_with_both(name)(x))
    assert rowwise.get_usages()["rowwise"]


def quantizer_with_both(name):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer


def test_copy_between_formats_requantizes(x):
    target = cg.quantize(x, "nvfp4")
    source = cg.quantize(x * 2, "mxfp8")
    target.copy_(source)
    assert_same_bytes(target, cg.quantize(source.dequantize(), "nvfp4"))


def test_to_another_device_moves_the_bytes(quantizer, x):
    q = quantizer(x.clone())
    meta = q.to("meta")
    assert type(meta) is type(q)
    assert meta.device.type == "meta"
    assert [buffer.shape for _, buffer in meta._buffers()] == [buffer.shape for _, buffer in q._buffers()]
    assert q.to("cpu") is q
    assert_same_bytes(q.to("cpu", copy=True), q)


def test_to_an_integer_decodes(quantizer, x):
    q = quantizer(x.clone())
    assert torch.equal(q.to(torch.int32), q.dequantize().to(torch.int32))


# ---- allocation --------------------------------------------------------------------------------------


def test_empty_like_has_the_planes_of_the_tensor(quantizer, x):
    q = quantizer(x.clone())
    if not is_identity(q):
        q.update_usage(columnwise_usage=False)
    like = torch.empty_like(q)
    assert type(like) is type(q)
    assert like.get_usages() == q.get_usages()
    assert [b.shape for _, b in like._buffers()] == [b.shape for _, b in q._buffers()]
    assert torch.empty_like(q, device="meta").device.type == "meta"


def test_new_empty_and_new_zeros(quantizer, x):
    q = quantizer(x.clone())
    assert q.new_empty((256, 128)).shape == (256, 128)
    zeros = q.new_zeros((256, 128))
    assert type(zeros) is type(q)
    for direction in cg.Direction:
        assert (zeros.dequantize(direction=direction) == 0).all()
    assert q.new_zeros((256, 128), device="meta").device.type == "meta"
    assert type(q.new_zeros(3, dtype=torch.int64)) is torch.Tensor
    assert torch.equal(q.new_zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_allocation_of_an_impossible_shape_is_refused(x):
    with pytest.raises(ValueError, match=r"no columnwise mxfp8 plane for a tensor of shape \[33, 64\].*multiple of 32"):
        cg.quantize(x, "mxfp8").new_zeros((33, 64))


def test_likes_with_values_are_plain(quantizer, x):
    """Optimizer states must be high precision."""
    q = quantizer(x.clone())
    for like in (torch.zeros_like(q), torch.ones_like(q), torch.full_like(q, 2.0), torch.randn_like(q)):
        assert type(like) is torch.Tensor
        assert (like.shape, like.dtype) == (q.shape, q.dtype)
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32


def test_to_empty_after_meta(quantizer, x):
    module = nn.Module()
    module.weight = nn.Parameter(quantizer(x.clone()))
    module.to("meta")
    module.to_empty(device="cpu")
    assert isinstance(module.weight, cg.QuantizedTensor)
    with torch.no_grad():
        module.weight.copy_(x)
    assert (module.weight.dequantize().float() - x.float()).norm() / x.float().norm() < 0.25


# ---- everything else ---------------------------------------------------------------------------------


def test_other_operations_see_the_decoded_values(quantizer, x):
    q = quantizer(x.clone())
    plain = q.dequantize()
    assert torch.equal(q + 1, plain + 1)
    assert torch.equal(q.t(), plain.t())
    assert torch.equal(q[3], plain[3])
    assert torch.equal(torch.cat([q, plain]), torch.cat([plain, plain]))
    assert q.sum() == plain.sum()
    assert q.numel() == plain.numel()
    assert not q.is_pinned()


def test_mutating_operations_requantize(quantizer, x):
    seed = torch.get_rng_state()
    q = quantizer(x.clone())
    expected = q.dequantize() * 3 + 1
    assert q.mul_(3).add_(1) is q
    torch.set_rng_state(seed)
    error = (q.dequantize().float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.35
    nn.init.normal_(q)
    assert 0.7 < q.dequantize().float().std() < 1.3


def test_mutating_operations_write_every_plane(quantizer, x):
    q = quantizer(x.clone())
    with torch.no_grad():
        q.fill_(2.0)
    for direction in cg.Direction:
        # 2.0 fills every block to its maximum, so each format represents it almost exactly
        assert torch.allclose(q.dequantize(direction=direction).float(), torch.tensor(2.0), rtol=0.15)


def test_an_operation_that_writes_a_list(quantizer, x):
    a, b = quantizer(x.clone()), quantizer((x + 1).clone())
    before = a.dequantize().clone(), b.dequantize().clone()
    torch._foreach_zero_([a, b, a])
    assert (a.dequantize() == 0).all()
    assert (b.dequantize() == 0).all()
    assert not (before[0] == 0).all()


def test_a_tensor_that_is_written_and_read_at_once(quantizer, x):
    q = quantizer(x.clone())
    q.sub_(q)
    assert (q.dequantize() == 0).all()


def test_item_assignment_writes_the_tensor(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    before = q.dequantize().detach().clone()
    expected = before.clone()
    with torch.no_grad():
        for tensor in (q, expected):
            tensor[0] = 3.0
            tensor[:, 5] = torch.full((128,), 2.0)
            tensor[x < -1] = -1.0
    after = q.dequantize().detach()
    # requantizing rounds, at most three times; the assignments move the tensor by far more
    assert (after - expected).norm() < 0.3 * expected.norm()
    assert (before - expected).norm() > 0.6 * expected.norm()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w[3].fill_(0),
        lambda w: w.t().mul_(0),
        lambda w: w.diagonal().fill_(9),
        lambda w: w.unsqueeze(0).zero_(),
        lambda w: w[3].__setitem__(0, 1.0),
    ],
)
def test_writes_that_would_be_lost_are_refused(x, write):
    """These views decode a copy; a write to the copy must not vanish."""
    w = cg.quantize(x, "mxfp8")
    before = buffers_of(w)
    with pytest.raises(RuntimeError, match="would be lost"):
        write(w)
    assert all(torch.equal(buffer, before[name]) for name, buffer in w._buffers())


def test_decoded_views_are_otherwise_plain(x):
    w = nn.Parameter(cg.quantize(x.float(), "mxfp8"))
    plain = w.dequantize().detach()
    assert torch.equal(w.t() + 1, plain.t() + 1)
    assert type(w[3] * 2) is torch.Tensor
    assert type(w.t().clone()) is torch.Tensor
    w[3].clone().fill_(0)
    assert [type(part) for part in w.unbind()] != []
    (torch.randn(4, 256) @ w.t()).sum().backward()
    assert type(w.grad) is torch.Tensor
    assert torch.equal(nn.functional.linear(x.float(), w), x.float() @ plain.t())


def test_several_written_tensors_are_checked_before_any_is_written(x):
    one, part = cg.quantize(x, "mxfp8"), cg.quantize(torch.cat((x, x)), "fp8")[:128]
    before, state = buffers_of(one), torch.zeros(128, 256)
    with pytest.raises(RuntimeError, match="shares its per-tensor"):
        torch._foreach_mul_([one, part], 3.0)
    with pytest.raises(RuntimeError, match="shares its per-tensor"):
        torch._foreach_add_([state, part], 3.0)
    assert all(torch.equal(buffer, before[name]) for name, buffer in one._buffers())
    assert (state == 0).all()


def test_foreach_copy_copies_bytes(quantizer, x):
    q, src = quantizer(x.clone()), quantizer((x * 2).clone())
    torch._foreach_copy_([q], [src])
    assert_same_bytes(q, src)


def test_memory_of_another_dtype_is_not_handed_out(x):
    w = cg.quantize(x, "mxfp8")
    for access in (lambda: torch.from_dlpack(w), lambda: w.apply_(lambda v: v), w.__dlpack__):
        with pytest.raises(RuntimeError, match="dequantize"):
            access()
    assert torch.equal(torch.from_numpy(w.numpy()), w.dequantize(dtype=torch.float32))


def test_splits_of_nothing(x):
    w = cg.quantize(x, "mxfp8")
    with pytest.raises((ValueError, RuntimeError), match="split"):
        w.split(0)


def test_out_arguments_are_requantized(quantizer, x):
    q = quantizer(x.clone())
    ones = torch.ones_like(x)
    torch.add(ones, ones, out=q)
    assert torch.allclose(q.dequantize().float(), torch.tensor(2.0), rtol=0.15)


def test_in_place_operations_that_change_the_shape_are_refused(x):
    q = cg.quantize(x, "mxfp8")
    before = buffers_of(q)
    for action in (lambda: q.t_(), lambda: q.squeeze_(), lambda: q.unsqueeze_(0)):
        with pytest.raises(RuntimeError, match="change the shape"):
            action()
    with pytest.warns(UserWarning, match="resized"), pytest.raises(RuntimeError, match="change the shape"):
        torch.add(torch.ones(2, 128, 256), 1, out=q)
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_optimizers_keep_the_parameter_and_write_it(quantizer, x, make, variant):
    weight = nn.Parameter(quantizer(x.float()))
    before = weight.dequantize().detach().clone()
    optimizer = make([weight], lr=0.5, **variant)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is weight
    assert isinstance(weight, cg.QuantizedTensor)
    moved = (before - weight.dequantize().detach()).mean()
    assert 0.3 < moved < 0.7
    for state in optimizer.state[weight].values():
        assert not isinstance(state, cg.QuantizedTensor)


def test_collectives_are_refused(quantizer, x):
    """Requantizing around a collective would leave ranks with different bytes: it must not happen."""
    q = quantizer(x.clone())
    before = buffers_of(q)
    with pytest.raises(RuntimeError, match="different bytes"):
        torch.ops._c10d_functional.all_reduce(q, "sum", "0")
    with pytest.raises(RuntimeError, match="different bytes"):
        torch.ops._c10d_functional.broadcast_(q, 0, "0")
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_shards_concatenate_to_the_whole(quantizer, x):
    q = quantizer(torch.cat((x, x, x)))
    shards = [piece.fsdp_extract_buffers() for piece in q.split(128)]
    meta = shards[0][1]
    assert meta["field_names"] == q.fsdp_buffer_fields()
    gathered = [torch.cat(buffers) for buffers in zip(*(buffers for buffers, _ in shards), strict=True)]
    whole = torch.empty_like(q)
    whole.fsdp_assign_gathered(gathered, meta)
    assert_same_bytes(whole, q)
    with pytest.raises(RuntimeError, match="gathered buffers for the fields"):
        whole.fsdp_assign_gathered(gathered[:-1], meta)
    with pytest.raises(RuntimeError, match="it should be"):
        whole.fsdp_assign_gathered([buffer[:1] for buffer in gathered], meta)
