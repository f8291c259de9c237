"""Views and slices of quantized tensors: aliases, block boundaries, shared scales."""

import contextlib
import io

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, DType
from crossgrain.tensor.decoded_view import DecodedView

from ..common.logs import warned
from ..common.quantizers import assert_same_bytes, buffers_of

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
def test_a_cut_inside_a_block_is_decoded_and_names_the_boundary(x, name, direction, cut, multiple):
    q = cg.quantize(torch.cat((x, x)), name)
    assert_read_only(q[cut], q.dequantize()[cut], rf"{direction.value} {name} plane .* multiples of {multiple} along M")
    assert_read_only(q[:, 8:256], q.dequantize()[:, 8:256], "multiples of .* along K")


@pytest.mark.parametrize(
    "write",
    [
        lambda view: torch.nn.functional.relu(view, inplace=True),
        lambda view: torch.nn.init.normal_(view),
        lambda view: torch.ops.aten.fill_.Scalar(view, 1.0),
        lambda view: setattr(view, "data", torch.zeros(64)),
        lambda view: view.set_(torch.zeros(64)),
        lambda view: view.view(8, 8).set_(torch.zeros(64)),
    ],
)
def test_writes_to_a_decoded_view_that_no_name_tells_are_refused_too(write):
    view = cg.quantize(torch.randn(32, 64), "mxfp8")[3]
    with pytest.raises(RuntimeError, match="decoded view of a quantized tensor would be lost"):
        write(view)


def test_arrays_of_a_decoded_view_are_read_only():
    view = cg.quantize(torch.randn(32, 64), "mxfp8")[3]
    for array in (view.numpy(), np.asarray(view), view.view(8, 8).numpy()):
        assert np.array_equal(array.ravel(), view.clone().numpy())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


@pytest.mark.parametrize("consumer", [torch.from_dlpack, np.from_dlpack, lambda view: view.__dlpack__()])
def test_memory_of_a_decoded_view_is_not_handed_out_by_dlpack(consumer):
    view = cg.quantize(torch.randn(32, 64), "mxfp8")[3]
    with pytest.raises(BufferError, match=r"shared by DLPack .* would be lost.*clone\(\)"):
        consumer(view)
    assert np.array_equal(np.from_dlpack(view.clone()), view.numpy())
    assert torch.equal(torch.from_dlpack(view, copy=True), view)


def assert_read_only(view, expected, why):
    assert isinstance(view, DecodedView)
    assert torch.equal(view, expected)
    with torch.no_grad():
        for write in (lambda: view.add_(1), lambda: view.data.unsqueeze(0).zero_(), lambda: view.__setitem__(0, 1.0)):
            with pytest.raises(RuntimeError, match=rf"decoded view of a quantized tensor would be lost.*: .*{why}"):
                write()
        with pytest.raises(RuntimeError, match="would be lost"):
            torch.add(expected, 1, out=view)
        with pytest.raises(RuntimeError, match="would be lost"):
            torch._foreach_add_([view], 1)
    assert torch.equal(view, expected)
    assert type(view.clone()) is type(view + 1) is torch.Tensor


CUTS = {
    "step": (lambda t: t[::2], "step 2"),
    "narrow": (lambda t: t.narrow(0, 8, 40), "multiples of 32 along M"),
    "chunk": (lambda t: t.chunk(3)[1], "multiples of 32 along M"),
    "split": (lambda t: t.split(24)[0], "multiples of 32 along M"),
    "split_with_sizes": (lambda t: t.split([40, 88])[1], "multiples of 32 along M"),
    "columns": (lambda t: t.chunk(5, 1)[0], "multiples of 32 along K"),
    "tensor_split": (lambda t: t.tensor_split(3)[2], "multiples of 32 along M"),
    "select": (lambda t: t.select(1, 3), "select picks single numbers"),
    "unbind": (lambda t: t.unbind()[5], "unbind picks single numbers"),
    "flat": (lambda t: t.view(-1)[7:39], "planes of shape"),
    "middle": (lambda t: t.view(2, 64, 256)[:, 3:5], "not along dimension 1"),
    "as_strided": (lambda t: t.as_strided((128, 128), (256, 2), 1), "not a slice of its first dimension"),
}


@pytest.mark.parametrize("case", CUTS)
def test_pieces_that_are_not_of_whole_blocks_are_decoded_and_read_only(x, case):
    cut, why = CUTS[case]
    for q in (cg.quantize(x, "mxfp8"), cg.HybridQuantizer(**hybrid_children())(x)):
        assert_read_only(cut(q), cut(q.dequantize()), why)
    w = nn.Parameter(cg.quantize(x, "mxfp8"))
    plain = w.detach().dequantize().requires_grad_()
    cut(w).square().sum().backward()
    cut(plain).square().sum().backward()
    assert torch.equal(w.grad, plain.grad)


def hybrid_children():
    return {
        "rowwise_quantizer": cg.MXFP8Quantizer(DType.kFloat8E4M3),
        "columnwise_quantizer": cg.MXFP8Quantizer(DType.kFloat8E5M2),
    }


def test_in_strict_mode_a_hybrid_is_not_split_through_blocks(x):
    """As in Transformer Engine, where other cuts of it, and other tensors, are decoded."""
    q = cg.HybridQuantizer(**hybrid_children())(x)
    with cg.settings.override(strict=True):
        for split in (lambda: q.split(24), lambda: q.chunk(3), lambda: q.split([40, 88])):
            with pytest.raises(NotImplementedError, match="strict mode: .*rowwise|strict mode: .*columnwise"):
                split()
        assert isinstance(q[::2], DecodedView)
        assert isinstance(q.split(24, 1)[0], DecodedView)
        assert isinstance(cg.quantize(x, "mxfp8").split(24)[0], DecodedView)


def test_decoded_pieces_are_saved_as_plain_tensors(x):
    """Megatron chunks weights of gated activations when it saves them."""
    q = cg.quantize(x, "mxfp8")
    file = io.BytesIO()
    torch.save({"w": q.chunk(3)[0]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, q.dequantize().chunk(3)[0])


def test_a_slice_as_strided_with_its_own_offset_is_the_slice(quantizer, x):
    q = quantizer(torch.cat((x, x * 2)))
    for part in (q, q[128:], q[128:].view(2, 64, 256), q[:, 128:], q[128:].detach()):
        again = part.as_strided(part.size(), part.stride(), part.storage_offset())
        assert type(again) is type(q)
        assert torch.equal(again.dequantize(), part.dequantize())
    assert q[128:].storage_offset() == 128 * 256


def test_a_rowwise_plane_can_be_cut_between_any_rows(x):
    for name in ("mxfp8", "nvfp4", "fp8_block", "nvfp4_row_scaled"):
        q = cg.quantize(x, name, columnwise=False)
        assert torch.equal(q[5:12].dequantize(), q.dequantize()[5:12])


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
        with pytest.raises(RuntimeError, match="out of bounds"):
            q.as_strided((128, 256), (256, 1), 129 * 256)
        for place in (((128, 256), (512, 1), 0), ((256, 256), (1, 256), 0), ((128, 256), (256, 1), 7)):
            assert torch.equal(q.as_strided(*place), q.dequantize().as_strided(*place))


def test_as_strided_of_a_slice_counts_from_the_whole(quantizer, x):
    """Other rows than torch's would be wrong numbers without a word."""
    q, plain = quantizer(torch.cat((x, x * 2, x * 3))), torch.arange(3 * x.numel()).view(3 * x.shape[0], -1)
    rows, width = x.shape
    part, theirs = q[rows:], plain[rows:]
    for offset in (None, rows * width, 2 * rows * width):
        first = theirs.as_strided((rows, width), (width, 1), offset)[0, 0].item() // width
        mine = part.as_strided((rows, width), (width, 1), offset)
        assert torch.equal(mine.dequantize(), q.dequantize()[first : first + rows])
    if not is_identity(q):
        with pytest.raises(ValueError, match="slice that begins at element .* the offset lies before that: 0"):
            part.as_strided((rows, width), (width, 1), 0)
        with pytest.raises(ValueError, match="not a slice of its first dimension"):
            q[:, width // 2 :].as_strided((rows, width // 2), (width, 1), width // 2)
        again = part.view(-1, width)[rows:]
        assert torch.equal(again.as_strided((rows, width), (width, 1)).dequantize(), again.dequantize())


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
    with warned("replaced"):
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
        with pytest.raises(ValueError, match=f"is in the format {name} and cannot be rewritten as"):
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


# ---- built anew from the metadata -------------------------------------------------------------------


def rebuilt(tensor):
    """The same object by the constructor, as a tensor and as a storage."""
    metadata = tensor.get_metadata()
    yield type(tensor)(tensor.shape, tensor.dtype, **metadata)
    yield tensor._storage_class()(**metadata)


@pytest.mark.parametrize("cut", [slice(None, 128), (slice(None), slice(None, 128))], ids=["M", "K"])
def test_a_slice_rebuilt_from_its_metadata_is_still_a_slice(quantizer, cut):
    """It shares its scale with the rest of the tensor, which must not change under it."""
    q = quantizer(torch.randn(256, 256))
    rest = q[128:].dequantize(), q[:, 128:].dequantize()
    for part in rebuilt(q[cut]):
        assert torch.equal(part.dequantize(), q[cut].dequantize())
        with contextlib.suppress(RuntimeError):
            part.quantize_(torch.full(part.shape, 1e4))
        if isinstance(cut, slice):
            assert torch.equal(q[128:].dequantize(), rest[0])
        else:
            assert torch.equal(q[:, 128:].dequantize(), rest[1])


def test_a_flat_view_rebuilt_from_its_metadata_is_still_flat(quantizer, x):
    flat = quantizer(x.clone()).view(-1)
    for again in rebuilt(flat):
        assert again.shape == flat.shape
        assert torch.equal(again.dequantize(), flat.dequantize())


def test_a_tensor_rebuilt_from_its_metadata_notices_writes(x):
    q = cg.quantize(x.clone(), "mxfp8")
    copies = list(rebuilt(q))
    row_only = q.detach()
    row_only.update_usage(columnwise_usage=False)
    row_only.quantize_(x * 2)
    for again in (*copies, *rebuilt(q)):
        with pytest.raises(RuntimeError, match="stale"):
            again.dequantize(direction=COLUMNWISE)


def test_metadata_with_other_buffers_is_of_another_tensor(x):
    """What was cut from something does not pass that on to what shares nothing with it."""
    part = cg.quantize(torch.cat([x, x]), "fp8")[:128]
    own = {"data": part._data.clone(), "fp8_scale_inv": part._scale_inv.clone()}
    apart = cg.Float8TensorStorage(**{**part.get_metadata(), **own})
    apart.quantize_(x * 2)
    assert torch.equal(apart.dequantize(), cg.quantize(x * 2, "fp8").dequantize())
