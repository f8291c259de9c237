"""The two-plane tensor, over every quantizer: reading, copying, saving, autograd, pickling."""

import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE

from ..common.quantizers import assert_same_bytes, buffers_of, dtype_of

DIRECTIONS = [ROWWISE, COLUMNWISE]


def is_identity(quantizer):
    return isinstance(quantizer, cg.IdentityQuantizer)


def test_reports_shape_dtype_device_of_the_input(quantizer, x):
    q = quantizer(x.clone())
    assert isinstance(q, torch.Tensor)
    assert isinstance(q, cg.QuantizedTensorStorage)
    assert (q.shape, q.dtype, q.device) == (x.shape, x.dtype, x.device)
    assert q.is_contiguous()
    assert type(q).__name__ in repr(q)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: d.value)
def test_one_direction_holds_the_same_bytes_as_both(quantizer, x, direction):
    """Unneeded directions are not made, and leaving one out does not change the other."""
    seed = torch.get_rng_state()
    both = quantizer(x.clone())
    torch.set_rng_state(seed)
    quantizer.set_usage(rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE)
    one = quantizer(x.clone())
    mine, theirs = one.plane(direction), both.plane(direction)
    assert torch.equal(mine.operand_codes(), theirs.operand_codes())
    shares_buffer = one.plane(direction.other) is not None
    if shares_buffer:
        assert one.plane(direction.other).data is mine.data
    else:
        assert one.get_usages() == {direction.value: True, direction.other.value: False}
    assert torch.equal(one.dequantize(), both.dequantize(direction=direction))


def test_the_two_directions_approximate_the_same_tensor(quantizer, x):
    q = quantizer(x.clone())
    for direction in DIRECTIONS:
        error = (q.dequantize(direction=direction).float() - x.float()).norm() / x.float().norm()
        assert error < 0.25


def test_storage_has_the_same_bytes_as_the_tensor(quantizer, x):
    seed = torch.get_rng_state()
    tensor = quantizer(x.clone())
    torch.set_rng_state(seed)
    quantizer.internal = True
    storage = quantizer(x.clone())
    assert not isinstance(storage, torch.Tensor)
    assert_same_bytes(storage, tensor)
    assert storage.size() == x.shape
    assert storage.size(-1) == x.shape[-1]
    assert storage.device == x.device
    assert torch.equal(storage.dequantize(), tensor.dequantize())


def test_n_dimensional_tensors_are_their_flattened_matrix(quantizer, x):
    x4 = x.view(2, 4, 16, 256)
    seed = torch.get_rng_state()
    flat = quantizer(x.clone())
    torch.set_rng_state(seed)
    q = quantizer(x4)
    assert q.shape == x4.shape
    for direction in DIRECTIONS:
        assert torch.equal(q.plane(direction).operand_codes(), flat.plane(direction).operand_codes())
    assert torch.equal(q.dequantize(), flat.dequantize().view(x4.shape))


def test_non_contiguous_input_is_its_contiguous_copy(quantizer, x):
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    seed = torch.get_rng_state()
    expected = quantizer(x.clone())
    torch.set_rng_state(seed)
    assert torch.equal(quantizer(strided).dequantize(), expected.dequantize())


@pytest.mark.parametrize("shape", [(0, 256), (128, 0), (2, 0, 128)])
def test_empty_tensors_round_trip(quantizer, shape):
    q = quantizer(torch.empty(shape))
    assert q.shape == torch.Size(shape)
    assert q.dequantize().shape == torch.Size(shape)
    assert q.update_usage() is None
    q.quantize_(torch.empty(shape))


# ---- writing in place --------------------------------------------------------------------------------


def test_requantizing_in_place_writes_every_plane(quantizer, x):
    seed = torch.get_rng_state()
    q = quantizer(x.clone())
    buffers = dict(q._buffers())
    torch.set_rng_state(seed)
    assert q.quantize_(x * 2) is q
    torch.set_rng_state(seed)
    assert_same_bytes(q, quantizer(x * 2))
    for name, buffer in q._buffers():
        assert buffer is buffers[name], "in place means the same buffers"


def test_planes_are_refreshed_whatever_the_quantizer_usages_say(quantizer, x):
    """A validation step that narrows usages must not leave a stale plane behind."""
    q = quantizer(x.clone())
    quantizer.set_usage(columnwise=False)
    seed = torch.get_rng_state()
    quantizer.update_quantized(x * 3, q)
    quantizer.set_usage(columnwise=True)
    torch.set_rng_state(seed)
    assert_same_bytes(q, quantizer(x * 3))


def test_noop_flag_leaves_the_tensor_alone(quantizer, x):
    q = quantizer(x.clone())
    before = buffers_of(q)
    q.quantize_(x * 2, noop_flag=torch.ones(1))
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())
    q.quantize_(x * 2, noop_flag=torch.zeros(1))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_out_argument_refills(quantizer, x):
    q = quantizer(x.clone())
    assert quantizer.quantize(x + 1, out=q) is q
    assert (q.dequantize().float() - (x + 1).float()).abs().mean() < 0.3


def test_a_saved_buffer_that_was_overwritten_is_noticed(quantizer, x):
    """Buffers saved for backward must not be used after an update through the wrapper."""

    class SavesBuffers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(*(buffer for _, buffer in weight._buffers()))
            return weight.dequantize() * 1

        @staticmethod
        def backward(ctx, grad):
            _ = ctx.saved_tensors
            return grad

    for update in (lambda w: w.quantize_(x * 2), lambda w: w.copy_(x * 2), lambda w: w.mul_(2), lambda w: w.zero_()):
        weight = nn.Parameter(quantizer(x.clone()))
        loss = SavesBuffers.apply(weight).sum()
        with torch.no_grad():
            update(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_saved_tensor_that_was_overwritten_is_noticed(quantizer, x):
    """Ordinary operations save the tensor itself, not its buffers."""
    a = torch.randn(128, 256, requires_grad=True)
    updates = (
        lambda w: w.quantize_(x * 2),
        lambda w: w.detach().quantize_(x * 2),
        lambda w: w.view(-1).quantize_((x * 2).view(-1)),
        lambda w: w._quantizer.quantize(x * 2, out=w),
        lambda w: setattr(w, "data", x * 2),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch._foreach_copy_([w], [x * 2]),
        lambda w: w.__setitem__(0, 1.0),
    )
    for update in updates:
        w = quantizer(x.clone())
        loss = (a * w).sum()
        with torch.no_grad():
            update(w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_reading_does_not_put_buffers_into_the_graph(quantizer, x):
    p = nn.Parameter(quantizer(x.float()))
    p.dequantize()
    nn.functional.linear(torch.randn(2, 256, dtype=dtype_of(quantizer)), p)
    assert not any(buffer.requires_grad for _, buffer in p._buffers())
    assert not p.detach().dequantize().requires_grad


def test_a_plane_that_missed_a_write_is_stale(quantizer, x):
    """An alias without the columnwise plane is written: the original must not hand out its old columns."""
    q = quantizer(x.clone())
    alias = q.detach()
    alias.update_usage(columnwise_usage=False)
    if alias.plane(COLUMNWISE) is not None:
        return  # one buffer serves both directions: it cannot go stale
    alias.quantize_(x * 2)
    assert torch.equal(q.dequantize(), alias.dequantize())
    readers = (
        lambda: q.dequantize(direction=COLUMNWISE),
        lambda: q.clone(),
        lambda: q.fsdp_extract_buffers(),
        lambda: pickle.dumps(q),
        lambda: q._map_buffers(torch.clone),
        lambda: quantizer(x.clone()).copy_(q),
        lambda: q.view(-1).dequantize(direction=COLUMNWISE),
    )
    for read in readers:
        with pytest.raises(RuntimeError, match=r"columnwise .* plane .* is stale"):
            read()
    q.quantize_(x * 3)
    q.dequantize(direction=COLUMNWISE)
    pickle.dumps(q)


def test_a_transposed_copy_of_an_alias_goes_stale_too(x):
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = cg.quantize(x, "fp8", columnwise=False)
        cache = q.detach()
        cache.update_usage(columnwise_usage=True)
        q.quantize_(x * 2)
        assert torch.equal(cache.dequantize(), q.dequantize())
        with pytest.raises(RuntimeError, match="stale"):
            cache.dequantize(direction=COLUMNWISE)
        cache._create_transpose()
        assert torch.equal(cache.dequantize(direction=COLUMNWISE), q.dequantize())


# ---- autograd ----------------------------------------------------------------------------------------


def test_gradients_pass_straight_through(quantizer):
    a = torch.randn(128, 128, requires_grad=True)
    weights = torch.randn(128, 128).to(dtype_of(quantizer)).float()
    (quantizer(a).dequantize() * weights).sum().backward()
    assert torch.equal(a.grad, weights)


def test_no_graph_without_grad_mode(quantizer):
    a = torch.randn(128, 128, requires_grad=True)
    with torch.no_grad():
        assert not quantizer(a).requires_grad


def test_an_internal_result_carries_no_graph(quantizer):
    quantizer.internal = True
    storage = quantizer(torch.randn(128, 128, requires_grad=True))
    assert not isinstance(storage, torch.Tensor)
    assert not storage.dequantize().requires_grad


def test_parameters_get_high_precision_gradients(quantizer, x):
    layer = nn.Linear(256, 128).to(dtype_of(quantizer))
    layer.weight = nn.Parameter(quantizer(x.float()))
    inp = torch.randn(8, 256, dtype=dtype_of(quantizer))
    layer(inp).sum().backward()
    assert type(layer.weight.grad) is torch.Tensor
    assert torch.equal(layer.weight.grad, torch.ones_like(layer(inp)).t() @ inp)


# ---- saving for backward -----------------------------------------------------------------------------


def test_prepare_for_saving_empties_and_restore_fills(quantizer, x):
    q = quantizer(x.clone())
    before = buffers_of(q)
    plain = torch.randn(3)
    flat, objects = cg.prepare_for_saving(q, None, plain)
    assert q.get_usages() == {"rowwise": False, "columnwise": False}
    assert [t for t in flat if isinstance(t, cg.QuantizedTensorStorage)] == []
    with pytest.raises(RuntimeError, match="does not hold any data"):
        q.dequantize()
    restored, rest = cg.restore_from_saved(objects, flat, return_saved_tensors=True)
    assert restored[0] is q
    assert restored[1] is None
    assert restored[2] is plain
    assert rest == []
    assert {name: True for name, _ in q._buffers()} == dict.fromkeys(before, True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_saving_the_same_tensor_twice(quantizer, x):
    q = quantizer(x.clone())
    expected = q.dequantize()
    flat, objects = cg.prepare_for_saving(q, q)
    first, second = cg.restore_from_saved(objects, flat)
    assert first is second is q
    assert torch.equal(q.dequantize(), expected)


def test_too_few_saved_tensors_change_nothing(quantizer, x):
    q = quantizer(x.clone())
    buffers, holder = q.prepare_for_saving()
    with pytest.raises(RuntimeError, match="buffers, but only"):
        holder.restore_from_saved(buffers[:-1])
    assert not any(name for name, _ in q._buffers())


def test_a_tensor_without_data_cannot_be_written(quantizer, x):
    q = quantizer(x.clone())
    q.prepare_for_saving()
    with pytest.raises(RuntimeError, match="does not hold any data|has no planes to write to"):
        q.copy_(x)


def test_saving_a_detached_copy_keeps_the_original(quantizer, x):
    q = quantizer(x.clone())
    q.detach().prepare_for_saving()
    assert q.get_usages() == {"rowwise": True, "columnwise": True}


def test_restore_from_func_ctx(quantizer, x):
    class Ctx:
        pass

    q, ctx = quantizer(x.clone()), Ctx()
    expected = q.dequantize()
    ctx.saved_tensors, ctx.tensor_objects = cg.prepare_for_saving(q)
    (restored,) = cg.restore_from_func_ctx(ctx)
    assert torch.equal(restored.dequantize(), expected)
    assert ctx.tensor_objects is None
    with pytest.raises(AttributeError, match="tensor_objects"):
        cg.restore_from_func_ctx(ctx)


# ---- wrappers ----------------------------------------------------------------------------------------


def test_data_is_an_alias(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    assert not q.data.requires_grad
    with torch.no_grad():
        q.data.copy_(x * 4)
    assert (q.dequantize().float() / x.float().clamp(min=0.5)).max() > 2


def test_assigning_quantized_data_takes_its_buffers(quantizer, x):
    q, other = nn.Parameter(quantizer(x.clone())), quantizer(x * 2)
    q.data = other
    assert_same_bytes(q, other)
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(q._buffers(), other._buffers(), strict=True))
    assert isinstance(q, nn.Parameter)


def test_assigning_plain_data_requantizes(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    seed = torch.get_rng_state()
    q.data = x * 2
    torch.set_rng_state(seed)
    assert_same_bytes(q, quantizer(x * 2))


def test_assigning_plain_data_of_another_shape_and_dtype_makes_new_buffers(quantizer, x):
    q, before = nn.Parameter(quantizer(x.clone())), quantizer(x.clone())
    old = [buffer for _, buffer in q._buffers()]
    kept = [buffer.clone() for buffer in old]
    other = x[:64].float()
    seed = torch.get_rng_state()
    q.data = other
    torch.set_rng_state(seed)
    assert isinstance(q, nn.Parameter) and type(q.data) is type(before)
    assert (q.shape, q.dtype) == (other.shape, dtype_of(quantizer))
    assert_same_bytes(q, quantizer(other))
    assert all(torch.equal(buffer, value) for buffer, value in zip(old, kept, strict=True))


def test_assigning_data_that_does_not_fit_changes_nothing(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    before = buffers_of(q)
    with pytest.raises(RuntimeError, match=r"larger tensor of shape \[128, 256\]"):
        q.data = x[:64]
    other_class = cg.quantize(x, "identity" if not is_identity(quantizer) else "mxfp8")
    with pytest.raises(TypeError, match="cannot assign"):
        q.data = other_class
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_share_memory_is_refused(quantizer, x):
    module = nn.Module()
    module.weight = nn.Parameter(quantizer(x.clone()))
    with pytest.raises(RuntimeError, match="no single storage"):
        module.share_memory()


def test_untyped_storage_is_empty(quantizer, x):
    assert quantizer(x.clone()).untyped_storage().size() == 0


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float16), nn.Module.half])
def test_module_casts_relabel_parameters(quantizer, x, convert):
    """Module.to and Module.half change the nominal dtype: the bytes stay, the class stays."""
    module = nn.Module()
    module.weight = nn.Parameter(quantizer(x.clone()))
    before = buffers_of(module.weight)
    convert(module)
    assert isinstance(module.weight, cg.QuantizedTensor)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.dtype == torch.float16
    assert module.weight.dequantize().dtype == torch.float16
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.weight._buffers())


def test_float_and_friends_dequantize(quantizer, x):
    q = quantizer(x.clone())
    for plain, dtype in ((q.float(), torch.float32), (q.half(), torch.float16), (q.bfloat16(), torch.bfloat16)):
        assert not isinstance(plain, cg.QuantizedTensor)
        assert torch.equal(plain, q.dequantize(dtype=dtype))


def test_nominal_dtype_can_be_changed(quantizer, x):
    q = quantizer(x.clone())
    before = buffers_of(q)
    alias = q.detach()
    q.dtype = torch.float32
    assert q.dtype == torch.float32
    casts = is_identity(quantizer) and q._quantizer.dtype is None  # its numbers are of the nominal dtype
    shared = [mine is theirs for (_, mine), (_, theirs) in zip(q._buffers(), alias._buffers(), strict=True)]
    assert not any(shared) if casts else all(shared)
    assert (q + 0).dtype == torch.float32
    assert q.to_dtype(torch.float16).dtype == torch.float16
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())
    assert quantizer.quantize(x, dtype=torch.float32).dtype == torch.float32


def test_make_like_shares_buffers(quantizer, x):
    q = quantizer(x.clone())
    like = type(q).make_like(q, requires_grad=True, dtype=torch.float32)
    assert like.requires_grad
    assert like.dtype == torch.float32
    assert_same_bytes(like.detach(), q)
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(like._buffers(), q._buffers(), strict=True))


def test_metadata_rebuilds_the_storage(quantizer, x):
    quantizer.internal = True
    storage = quantizer(x.clone())
    rebuilt = type(storage)(**storage.get_metadata())
    assert_same_bytes(rebuilt, storage)
    assert not any(value is storage for value in storage.get_metadata().values())
    if not isinstance(storage, cg.HybridQuantizedTensorStorage):
        assert rebuilt._epochs is storage._epochs, "it is an alias, and shares the record of writes"


def test_clear_frees_the_codes(quantizer, x):
    q = quantizer(x.clone())
    q.clear()
    assert all(data is None or data.numel() == 0 for data in q.get_data_tensors())
    assert q.get_usages() == {"rowwise": False, "columnwise": False}
    q.clear()


def test_copy_from_storage_copies_bytes(quantizer, x):
    q, other = quantizer(x.clone()), quantizer(x * 2)
    q.copy_from_storage(other)
    assert_same_bytes(q, other)


def test_flatten_and_unflatten(quantizer, x):
    q = quantizer(x.clone())
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    rebuilt = type(q).__tensor_unflatten__(inner, context, q.shape, q.stride())
    assert_same_bytes(rebuilt, q)
