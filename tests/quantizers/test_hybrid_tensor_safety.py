"""What could corrupt a hybrid without a word: old planes, half-done writes, shared memory, modes of torch."""

import pickle
import threading

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.tensor.holder import Epoch, extent_of

from ..common.quantizers import PAIRS, assert_same_bytes, buffers_of, hybrid_of

DIRECTIONS = [ROWWISE, COLUMNWISE]
BOTH = pytest.mark.parametrize("missed", DIRECTIONS, ids=lambda d: d.value)
HYBRIDS = pytest.mark.parametrize("h", [hybrid_of(*names) for names in PAIRS], ids=["-".join(names) for names in PAIRS])


def unchanged(q, before):
    return all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def readers(q, missed):
    other = hybrid_of("mxfp8", "nvfp4")
    return (
        lambda: q.dequantize(direction=missed),
        lambda: getattr(q, f"{missed.value}_sub_storage"),
        lambda: kernels.decode_operand(q.plane(missed)),
        lambda: q.clone(),
        lambda: q.to(torch.float16),
        lambda: q.view(-1).dequantize(direction=missed),
        lambda: q[:].clone(),
        lambda: q.detach().dequantize(direction=missed),
        lambda: type(q).make_like(q).dequantize(direction=missed),
        lambda: q._map_buffers(torch.clone),
        lambda: pickle.dumps(q),
        lambda: q.__tensor_flatten__(),
        lambda: q.fsdp_extract_buffers(),
        lambda: q.get_metadata(),
        lambda: torch.empty_like(q).copy_(q),
        lambda: torch.empty_like(q).copy_from_storage(q),
        lambda: other(q) if missed is ROWWISE else torch.empty_like(q).copy_(q),
    )


# ---- staleness -----------------------------------------------------------------------------------------


@BOTH
@HYBRIDS
def test_a_child_that_missed_a_write_is_stale(h, x, missed):
    q = h(x.clone())
    alias = q.detach()
    alias.update_usage(**{f"{missed.value}_usage": False})
    alias.quantize_(x * 2)
    assert torch.equal(q.dequantize(direction=missed.other), alias.dequantize())
    for read in readers(q, missed):
        with pytest.raises(RuntimeError, match=f"{missed.value} .* stale"):
            read()
    seed = torch.get_rng_state()
    q.quantize_(x * 3)
    torch.set_rng_state(seed)
    assert_same_bytes(q, h((x * 3).clone()))
    pickle.dumps(q)


@BOTH
@HYBRIDS
@pytest.mark.parametrize("alias", [lambda q: q.detach(), lambda q: q.view(-1, q.shape[-1])])
def test_aliases_that_hold_one_child_each_notice_the_writes_of_the_other(h, x, missed, alias):
    q = h(x.clone())
    held = alias(q)
    held.update_usage(**{f"{missed.other.value}_usage": False})
    held = held.detach()  # an alias of it knows as well
    q.update_usage(**{f"{missed.value}_usage": False})
    held.dequantize()
    q.quantize_(x * 2)
    with pytest.raises(RuntimeError, match=f"{missed.value} .* stale"):
        held.dequantize()
    held.quantize_(x * 3)
    held.dequantize()
    with pytest.raises(RuntimeError, match=f"{missed.other.value} .* stale"):
        q.dequantize()


def test_a_slice_that_holds_one_child_notices_a_write_to_the_other(x):
    q = hybrid_of("mxfp8", "nvfp4_2d")(x)
    part = q[:64]
    part.update_usage(rowwise_usage=False)
    q.update_usage(columnwise_usage=False)
    q.quantize_(x * 2)
    with pytest.raises(RuntimeError, match="columnwise .* stale"):
        part.dequantize()


@BOTH
def test_a_write_to_one_child_makes_the_other_stale(x, missed):
    for write in (lambda c: c.quantize_(x * 2), lambda c: c.mul_(2), lambda c: c.detach().copy_(x * 2)):
        q = hybrid_of("mxfp8", "nvfp4")(x)
        write(getattr(q, f"{missed.other.value}_sub_storage"))
        with pytest.raises(RuntimeError, match=f"{missed.value} .* stale"):
            q.dequantize(direction=missed)
        q.dequantize(direction=missed.other)


def test_writing_one_slice_does_not_freshen_the_rest(x):
    h = hybrid_of("mxfp8", "mxfp8")
    for write in (lambda part: part.quantize_(x[64:] * 2), lambda part: part.copy_(h(x[64:]))):
        w = hybrid_of("mxfp8", "mxfp8")(x)
        upper = w[:64]
        upper.update_usage(columnwise_usage=False)
        upper.copy_(x[:64] * 2)
        write(w[64:])
        with pytest.raises(RuntimeError, match="columnwise .* stale"):
            w.dequantize(direction=COLUMNWISE)
        w.dequantize()


@pytest.mark.parametrize("cut", [lambda q: (q[:64], q[64:]), lambda q: q.split(128, 1)])
def test_columns_that_a_slice_made_for_itself_are_stale_only_if_its_rows_were_written(x, cut):
    q = hybrid_of("mxfp8", "mxfp8", "rowwise_dequantized")(x)
    q.update_usage(columnwise_usage=False)
    one, other = cut(q)
    one.update_usage(columnwise_usage=True)
    columns = one.dequantize(direction=COLUMNWISE)
    other.copy_(other.dequantize() * 2)
    assert torch.equal(one.dequantize(direction=COLUMNWISE), columns)
    assert torch.equal(one.detach().view(-1, one.shape[-1]).dequantize(direction=COLUMNWISE), columns)
    q.copy_(q.dequantize() * 2)
    with pytest.raises(RuntimeError, match="columnwise .* stale"):
        one.dequantize(direction=COLUMNWISE)
    one.copy_(columns)  # all of its own columns are written
    one.dequantize(direction=COLUMNWISE)


def test_rows_that_missed_a_write_of_a_slice_stay_stale_when_other_rows_are_written(x):
    q = hybrid_of("mxfp8", "mxfp8", "rowwise_dequantized")(x)
    q.update_usage(columnwise_usage=False)
    one = q[:64]
    one.update_usage(columnwise_usage=True)
    columns = one.detach()
    columns.update_usage(rowwise_usage=False)
    columns.copy_(x[:64] * 2)
    q[64:].copy_(x[64:] * 2)
    with pytest.raises(RuntimeError, match="rowwise .* stale"):
        one.dequantize(direction=ROWWISE)


def test_slices_that_may_overlap_are_told_apart():
    memory = torch.empty(8, 16)
    parts = [memory, memory[:4], memory[4:], memory[:, :8], memory[:, 8:], memory[2:6, 4:12], memory.view(-1)[:64]]
    cells = torch.arange(128).view(8, 16)
    numbers = [cells, cells[:4], cells[4:], cells[:, :8], cells[:, 8:], cells[2:6, 4:12], cells.view(-1)[:64]]
    for a, ours in zip(parts, numbers, strict=True):
        for b, theirs in zip(parts, numbers, strict=True):
            common = bool(torch.isin(ours, theirs).any())
            assert extent_of(a).meets(extent_of(b)) == common or (min(a.dim(), b.dim()) == 1 and not common)


def test_many_writes_to_slices_are_taken_for_one_to_all():
    epoch, parts = Epoch(), torch.empty(256, 16).split(2)
    for number, part in enumerate(parts, 1):
        epoch.note_part(number, extent_of(part))
    assert epoch.last_within(extent_of(parts[-1])) == 128
    assert epoch.last_within(extent_of(parts[0])) >= 1


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_writing_slices_keeps_fresh_what_is(x, source):
    h = hybrid_of("mxfp8", "mxfp8", source)
    w = h(x)
    w[64:].quantize_(x[64:] * 2)
    w[:64].copy_(h(x[:64] * 2))
    assert_same_bytes(w, h(x * 2))


def test_a_clone_is_no_alias(x):
    h = hybrid_of("mxfp8", "nvfp4")
    q = h(x)
    clone = q.clone()
    q.update_usage(columnwise_usage=False)
    q.quantize_(x * 2)
    assert_same_bytes(clone, h(x))


# ---- writes that fail ----------------------------------------------------------------------------------


@HYBRIDS
def test_a_write_that_cannot_be_done_changes_nothing(h, x):
    q = h(x.clone())
    before, amaxes = buffers_of(q), [getattr(h.child(d), "amax", torch.zeros(1)).clone() for d in DIRECTIONS]
    wrong = (
        (x[:64], ValueError),
        (x.to(torch.int32), TypeError),
        (x.to("meta"), ValueError),
        ([1.0], TypeError),
        (x.view(256, 128), ValueError),
    )
    for src, error in wrong:
        with pytest.raises(error):
            q.quantize_(src)
    with pytest.raises(ValueError, match="can only write to a hybrid tensor, got a MXFP8Tensor"):
        h.quantize(x, out=cg.quantize(x, "mxfp8"))
    try:
        torch.set_flush_denormal(True)
        if not all(isinstance(h.child(direction), cg.IdentityQuantizer) for direction in DIRECTIONS):
            with pytest.raises(RuntimeError, match="flush"):
                q.quantize_(x * 2)
    finally:
        torch.set_flush_denormal(False)
    assert unchanged(q, before)
    assert amaxes == [getattr(h.child(direction), "amax", torch.zeros(1)) for direction in DIRECTIONS]
    q.quantize_(x * 2, noop_flag=torch.ones(1))
    assert unchanged(q, before)


@pytest.mark.parametrize("names", [("mxfp8", "fp8"), ("fp8", "mxfp8"), ("identity", "nvfp4"), ("nvfp4", "identity")])
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_a_slice_with_a_shared_scale_is_not_written_at_all(names, x, source):
    q = hybrid_of(*names, source)(torch.cat((x, x)))
    before = buffers_of(q)
    writes = (lambda p: p.copy_(x * 2), lambda p: p.mul_(2), lambda p: p.copy_(hybrid_of(*names, source)(x * 2)))
    for write in writes:
        with pytest.raises(RuntimeError, match="shares its per-tensor"):
            write(q[:128])
    assert unchanged(q, before)


def test_a_child_that_the_source_lacks_is_not_written_under_a_shared_scale(x):
    q = hybrid_of("mxfp8", "fp8")(torch.cat((x, x)))
    before, src = buffers_of(q), hybrid_of("mxfp8", "fp8")(x * 2)
    src.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="shares its per-tensor"):
        q[:128].copy_(src)
    assert unchanged(q, before)


def test_a_quantizer_of_other_formats_is_refused_before_anything_is_written(x):
    q = hybrid_of("mxfp8", "fp8_block")(x)
    before = buffers_of(q)
    reasons = {"nvfp4": "which NVFP4Quantizer cannot write", "fp8_block_2d": "cannot be rewritten as fp8_block_2d"}
    for column, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            hybrid_of("mxfp8", column).update_quantized(x * 2, q)
    assert unchanged(q, before)
    hybrid_of("mxfp8_e5m2", "fp8_block").update_quantized(x, q)
    assert_same_bytes(q, hybrid_of("mxfp8_e5m2", "fp8_block")(x))


# ---- shared memory -------------------------------------------------------------------------------------


def test_an_identity_child_keeps_the_input(x):
    """As documented: no copy, so the input must not be written while the hybrid is in use, and writes reach it."""
    q = hybrid_of("mxfp8", "identity")(x)
    assert q.columnwise_sub_storage._hp_data.data_ptr() == x.data_ptr()
    q.quantize_(x * 2)
    assert torch.equal(q.dequantize(direction=COLUMNWISE), x)
    derived = hybrid_of("mxfp8", "identity", "rowwise_dequantized")(x)
    assert derived.columnwise_sub_storage._hp_data.data_ptr() != x.data_ptr()


def test_quantizing_is_no_write_to_the_input(x):
    """An operation that saved the input for backward must not think that it changed."""
    y = torch.exp(x.float().requires_grad_())
    hybrid_of("mxfp8", "identity")(y.detach())
    y.sum().backward()


@pytest.mark.parametrize("names", [("mxfp8", "identity"), ("identity", "mxfp8"), ("identity", "identity")])
def test_decoded_values_are_not_the_planes(names, x):
    """In-place arithmetic on what was decoded would change one child and not the other."""
    q = hybrid_of(*names)(x.clone())
    for direction in DIRECTIONS:
        q.dequantize(direction=direction).zero_()
    q.float().zero_()
    q.detach().to(torch.int32).zero_()
    assert q.dequantize().abs().max() > 0
    assert q.dequantize(direction=COLUMNWISE).abs().max() > 0


@pytest.mark.parametrize("names", [("mxfp8", "identity"), ("identity", "nvfp4"), ("identity", "identity_bf16")])
def test_every_alias_sees_a_write_of_another_dtype(names, x):
    """Updates come from fp32 masters: the buffers stay, and keep their dtype."""
    q = hybrid_of(*names)(x.clone())
    alias, flat, buffers = q.detach(), q.view(-1), dict(q._buffers())
    q.copy_(x.float() * 2)
    assert all(buffer is buffers[name] for name, buffer in q._buffers())
    for direction in DIRECTIONS:
        assert torch.equal(alias.dequantize(direction=direction), q.dequantize(direction=direction))
        assert torch.equal(flat.dequantize(direction=direction), q.dequantize(direction=direction).view(-1))
    if "nvfp4" not in names:  # which has a scale of the whole tensor
        q[:64].copy_(x[:64].float())
        assert torch.equal(alias.dequantize(direction=COLUMNWISE)[:64], q.dequantize(direction=COLUMNWISE)[:64])


@pytest.mark.parametrize("names", [("identity", "identity"), ("mxfp8", "identity"), ("identity", "mxfp8")])
def test_a_source_in_the_same_memory(names):
    x = torch.randn(128, 128)
    expected = x.t().clone()
    q = hybrid_of(*names)(x)
    q.quantize_(x.t())
    assert_same_bytes(q, hybrid_of(*names)(expected))
    w = hybrid_of(*names)(torch.randn(128, 64))
    source = w[0:64].clone()
    w[32:96].copy_(w[0:64])
    assert_same_bytes(w[32:96].clone(), source)


def test_identity_takes_a_source_in_its_own_memory():
    x = torch.randn(64, 64)
    expected = x.t().clone()
    q = cg.quantize(x, "identity")
    q.copy_(q.dequantize().t())
    assert torch.equal(q.dequantize(), expected)


# ---- modes of torch ------------------------------------------------------------------------------------


@HYBRIDS
def test_inference_mode(h, x):
    q = h(x.clone())
    with torch.inference_mode():
        for alias in (q.detach(), q.data, q.view(-1), q[:], nn.Parameter(q), q.split(128)[0]):
            assert torch.equal(alias.dequantize().view(-1), q.dequantize().view(-1))
            assert not alias.is_inference()
        made = h(x.clone())
        made.quantize_(x)
        made.mul_(2)
        assert made.detach().is_inference()
        alias = q.detach()
        alias.update_usage(columnwise_usage=False)
        alias.quantize_(x * 2)
    assert made.dequantize().shape == x.shape
    with pytest.raises(RuntimeError, match="stale"):
        q.dequantize(direction=COLUMNWISE)


@HYBRIDS
def test_gradients_pass_straight_through(h):
    a, weights = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128)
    (h(a).dequantize() * weights).sum().backward()
    assert torch.equal(a.grad, weights)
    a.grad = None
    (h(a).dequantize(direction=COLUMNWISE) * weights).sum().backward()
    assert torch.equal(a.grad, weights)
    with torch.no_grad():
        assert not h(a).requires_grad
    p = nn.Parameter(h(a.detach()))
    nn.functional.linear(torch.ones(4, 128), p).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert not any(buffer.requires_grad for _, buffer in p._buffers())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_optimizers_write_both_children(x, make, variant):
    weight = nn.Parameter(hybrid_of("mxfp8", "nvfp4")(x.float()))
    optimizer = make([weight], lr=0.5, **variant)
    before = [weight.detach().dequantize(direction=direction) for direction in DIRECTIONS]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    for direction, old in zip(DIRECTIONS, before, strict=True):
        assert 0.3 < (old - weight.detach().dequantize(direction=direction)).mean() < 0.7


@HYBRIDS
def test_collectives_are_refused(h, x):
    with pytest.raises(RuntimeError, match="different bytes"):
        torch.ops._c10d_functional.all_reduce(h(x.clone()), "sum", "0")


def test_default_device_and_dtype_do_not_matter(x):
    for names in PAIRS:
        seed = torch.get_rng_state()
        expected = hybrid_of(*names)(x.clone())
        h = hybrid_of(*names)
        try:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                torch.set_rng_state(seed)
                assert_same_bytes(h(x.clone()), expected)
                assert h.make_empty((128, 128)).device.type == "meta"
        finally:
            torch.set_default_dtype(torch.float32)


def test_non_contiguous_input(x):
    for names in PAIRS:
        seed = torch.get_rng_state()
        expected = hybrid_of(*names)(x.clone())
        torch.set_rng_state(seed)
        q = hybrid_of(*names)(x.t().contiguous().t())
        for direction in DIRECTIONS:
            assert torch.equal(q.dequantize(direction=direction), expected.dequantize(direction=direction))
        assert q.is_contiguous()
        q.quantize_(x.t().contiguous().t())


def test_function_transforms_are_refused_or_right(x):
    h = hybrid_of("mxfp8", "nvfp4")
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda t: h(t).dequantize().sum())(x.float())


def test_threads_share_a_quantizer(x):
    h = hybrid_of("mxfp8", "nvfp4_rht")
    inputs = [x * scale for scale in range(1, 9)]
    results = [None] * len(inputs)

    def run(index):
        results[index] = h(inputs[index])
        results[index].quantize_(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for q, values in zip(results, inputs, strict=True):
        assert_same_bytes(q, h(values))


def test_an_operation_on_a_list_that_one_tensor_refuses_writes_none(x):
    """Columns that are made from rows need whole blocks of rows, which this slice does not have."""
    made = hybrid_of("mxfp8", "mxfp4", "rowwise_dequantized")(x)
    made.update_usage(rowwise_usage=False)
    part, other = made[:, :16], cg.quantize(x, "mxfp8")
    before = buffers_of(other)
    with pytest.raises(ValueError, match=r"cannot quantize a tensor of shape \[128, 16\] rowwise as mxfp8"):
        torch._foreach_mul_([other, part], 0.5)
    assert unchanged(other, before)
