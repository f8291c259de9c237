"""Quantizers: usages, allocation, equality, reduction over ranks, and the answers to bad input."""

import pickle

import pytest
import torch
import torch.multiprocessing as mp

import crossgrain as cg
from crossgrain import DType

from ..common.logs import warned
from ..common.quantizers import E4M3, E5M2, QUANTIZERS, assert_same_bytes, buffers_of

BLOCK_FORMATS = ["mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_2d", "mxfp4", "mxfp6_e3m2"]
ALL_NAMES = [fmt.name for fmt in cg.formats.formats()]


# ---- usages ------------------------------------------------------------------------------------------


def test_usages_are_set_and_kept(quantizer):
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    quantizer.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    quantizer.set_usage(rowwise=None, columnwise=True)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}


def test_a_copy_has_its_own_usages(quantizer):
    quantizer.internal = True
    copied = quantizer.copy()
    assert type(copied) is type(quantizer)
    assert copied.internal
    copied.set_usage(columnwise=False)
    assert quantizer.columnwise_usage


def test_a_tensor_keeps_its_own_copy_of_the_quantizer(quantizer, x):
    q = quantizer(x.clone())
    assert q._quantizer is not quantizer
    quantizer.set_usage(columnwise=False)
    assert q._quantizer.columnwise_usage


def test_nothing_to_make_is_an_error(quantizer, x):
    quantizer.set_usage(rowwise=False, columnwise=False)
    if isinstance(quantizer, cg.IdentityQuantizer):
        assert torch.equal(quantizer(x).dequantize(), quantizer(x).dequantize())
        return
    with pytest.raises(ValueError, match="neither rowwise nor columnwise usage"):
        quantizer(x)


def test_make_empty_is_what_quantize_returns(quantizer, x):
    made, quantized = quantizer.make_empty(x.shape, dtype=x.dtype), quantizer(x.clone())
    assert type(made) is type(quantized)
    assert (made.shape, made.dtype, made.device) == (quantized.shape, quantized.dtype, quantized.device)
    assert [(n, b.shape, b.dtype) for n, b in made._buffers()] == [
        (n, b.shape, b.dtype) for n, b in quantized._buffers()
    ]
    seed = torch.get_rng_state()
    made.quantize_(x)
    torch.set_rng_state(seed)
    assert_same_bytes(made, quantizer(x.clone()))
    assert quantizer.make_empty((128, 128), requires_grad=True).requires_grad
    assert quantizer.make_empty((128, 128), device="meta").device.type == "meta"
    quantizer.internal = True
    assert not isinstance(quantizer.make_empty((128, 128)), torch.Tensor)


def test_padding_of_scales_is_zero():
    """Bytes outside the logical region must not depend on what the memory held before."""
    q = cg.quantize(torch.randn(32, 64), "mxfp8")
    assert q._rowwise_scale_inv.shape == (128, 4)
    assert (q._rowwise_scale_inv[32:] == 0).all()
    assert (q._rowwise_scale_inv[:, 2:] == 0).all()


def test_multi_quantize(quantizer, x):
    assert [q.shape for q in quantizer.multi_quantize([x, x[:, :128]])] == [(128, 256), (128, 128)]


def test_quantizing_a_quantized_tensor_decodes_it_first(quantizer, x):
    source = cg.quantize(x, "mxfp8")
    seed = torch.get_rng_state()
    expected = quantizer(source.dequantize())
    torch.set_rng_state(seed)
    assert_same_bytes(quantizer(source), expected)


def test_requantization_safety(quantizer, x):
    """The promise is kept: quantizing again gives the same bytes."""
    stochastic = getattr(quantizer, "stochastic_rounding", False)
    delayed = isinstance(quantizer, cg.Float8Quantizer)
    assert quantizer.is_requantization_safe() == (not stochastic and not delayed)
    if quantizer.is_requantization_safe():
        assert_same_bytes(quantizer(x.clone()), quantizer(x.clone()))


def test_only_per_tensor_fp8_gathers_rowwise_only(quantizer):
    per_tensor = isinstance(quantizer, (cg.Float8Quantizer, cg.Float8CurrentScalingQuantizer))
    assert quantizer.supports_only_rowwise_all_gather() == per_tensor


def test_base_class_defaults():
    base = cg.Quantizer(rowwise=True, columnwise=False)
    assert not base.is_requantization_safe()
    assert not base.supports_only_rowwise_all_gather()
    with pytest.raises(NotImplementedError):
        base.encoding(cg.ROWWISE)


def test_custom_quantizers_must_say_how_to_make_empty_tensors():
    class Custom(cg.Quantizer):
        custom = True

    with pytest.raises(NotImplementedError, match="Custom is a custom quantizer"):
        Custom(rowwise=True, columnwise=True).make_empty((2, 2))


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZERS)
def test_equality_is_by_configuration(name):
    one, two = QUANTIZERS[name](), QUANTIZERS[name]()
    if name == "fp8_delayed":
        assert one != two
        assert one == one.copy() or one is not one.copy()  # identity: its scale belongs to somebody
        return
    assert one == two
    assert hash(one) == hash(two)
    two.set_usage(columnwise=False)
    assert one != two
    assert one != object()


def test_different_options_are_different_values():
    assert len({QUANTIZERS[name]() for name in QUANTIZERS}) == len(QUANTIZERS)


def test_pickling_keeps_the_configuration(quantizer, x):
    loaded = pickle.loads(pickle.dumps(quantizer))
    assert type(loaded) is type(quantizer)
    assert loaded.get_usages() == quantizer.get_usages()
    if quantizer._value_fields is not None:
        assert loaded == quantizer


@pytest.mark.parametrize("make", [cg.NVFP4Quantizer, lambda **kw: cg.Float8CurrentScalingQuantizer(E4M3, **kw)])
def test_pickling_drops_the_process_group(make):
    quantizer = make(with_amax_reduction=True, amax_reduction_group=object())
    loaded = pickle.loads(pickle.dumps(quantizer))
    assert loaded.amax_reduction_group is None
    assert not loaded.with_amax_reduction, "without its group it would reduce over all ranks"
    everybody = pickle.loads(pickle.dumps(make(with_amax_reduction=True)))
    assert everybody.with_amax_reduction


def test_replacing_the_quantizer_warns_and_keeps_the_bytes(x):
    q = cg.quantize(x, "mxfp8")
    before = buffers_of(q)
    with warned("replaced"):
        q.update_quantizer(cg.MXFP8Quantizer(E5M2))
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())
    assert torch.equal(q.dequantize(), cg.quantize(x, "mxfp8").dequantize()), "decoding does not ask the quantizer"
    q.quantize_(x)
    assert_same_bytes(q, cg.quantize(x, "mxfp8_e5m2"))
    q._quantizer = None
    with pytest.raises(RuntimeError, match="no quantizer"):
        q.update_quantizer(cg.MXFP8Quantizer(E4M3))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_tensor_without_quantizer_is_requantized_in_its_own_format(name, x):
    q = cg.quantize(x.clone(), name)
    expected = cg.quantize((x * 2).clone(), name)
    q._quantizer = None
    q.quantize_(x * 2)
    assert_same_bytes(q, expected)


# ---- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_dimension_that_does_not_divide_is_named(name):
    length = cg.get_format(name).block_length
    quantizer = cg.quantizer_for(name)
    for shape, which in (((length, length + 1), "last dimension"), ((length + 1, length), "other dimensions")):
        bad = torch.randn(shape)
        size = shape[1] if which.startswith("last") else shape[0]
        assert not quantizer.is_quantizable(bad)
        with pytest.raises(
            ValueError, match=rf"shape \[{shape[0]}, {shape[1]}\].*{name}.*{which}.* is {size}.* {length}"
        ):
            quantizer(bad)
        with pytest.raises(ValueError, match=f"multiple of {length}"):
            quantizer.make_empty(shape)
    assert quantizer.is_quantizable(torch.randn(length, length))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
def test_a_direction_only_needs_its_own_dimension_to_divide(name):
    """One row is enough for a rowwise plane, one column for a columnwise one."""
    length = cg.get_format(name).block_length
    row = cg.quantize(torch.randn(1, length), name, columnwise=False)
    assert row.dequantize().shape == (1, length)
    column = cg.quantize(torch.randn(length, 3), name, rowwise=False)
    assert column.dequantize().shape == (length, 3)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_2d"])
def test_fp8_blocks_may_be_ragged(name):
    x = torch.randn(130, 200)
    q = cg.quantize(x, name)
    for direction in cg.Direction:
        assert (q.dequantize(direction=direction) - x).norm() / x.norm() < 0.05
    assert not cg.quantizer_for(name).is_quantizable(x)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_rank(name):
    quantizer = cg.quantizer_for(name)
    vector = torch.randn(256)
    if cg.get_format(name).ragged:
        assert quantizer(vector).dequantize().shape == (256,)
        for transposes in (False, True):
            with cg.settings.override(non_tn_fp8_gemm=not transposes):
                q = quantizer(torch.tensor(2.0))
                assert q.shape == q.clone().shape == () and q.dequantize() == 2.0
                q.copy_(torch.tensor(-3.0))
                assert all(q.dequantize(direction=plane.direction) == -3.0 for plane in q.planes())
    else:
        with pytest.raises(ValueError, match="0 dimensions, but needs at least 2"):
            quantizer(torch.tensor(1.0))
        with pytest.raises(ValueError, match="1 dimensions, but needs at least 2"):
            quantizer(vector)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(quantizer, dtype):
    with pytest.raises(TypeError, match=f"float16 tensors, got {dtype}"):
        quantizer(torch.zeros(128, 128).to(dtype))


def test_what_is_not_a_tensor_is_refused(quantizer):
    with pytest.raises(TypeError, match="can only quantize tensors, got list"):
        quantizer([[1.0]])


def test_a_destination_that_does_not_fit_is_untouched(quantizer, x):
    q = quantizer(x.clone())
    before = buffers_of(q)
    other = cg.quantize(x, "mxfp8" if not isinstance(q, cg.MXFP8Tensor) else "nvfp4")
    with pytest.raises(ValueError, match="can only write to a"):
        quantizer.quantize(x, out=other)
    with pytest.raises(ValueError, match=r"shape \[128, 128\]"):
        quantizer.quantize(x[:, :128], out=q)
    with pytest.raises(ValueError, match="can only write to a"):
        quantizer.quantize(x, out=torch.empty(128, 256))
    with pytest.raises(TypeError, match="got torch.int64"):
        quantizer.quantize(torch.zeros(128, 256, dtype=torch.int64), out=q)
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_a_source_on_another_device_is_refused(quantizer, x):
    if isinstance(quantizer, cg.IdentityQuantizer):
        return
    with pytest.raises(ValueError, match="on meta"):
        quantizer.quantize(x.to("meta"), out=quantizer(x.clone()))


def test_a_destination_made_for_other_buffers_is_refused(x):
    """1-D and 2-D block scales have buffers of different shapes."""
    q = cg.quantize(x, "fp8_block_2d")
    before = buffers_of(q)
    one_d = cg.quantizer_for("fp8_block")
    with pytest.raises(
        ValueError, match="rowwise plane .* is in the format fp8_block_2d and cannot be rewritten as fp8_block"
    ):
        one_d.update_quantized(x, q)
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())


def test_nominal_dtypes_are_high_precision(quantizer, x):
    with pytest.raises(TypeError, match="nominal dtype"):
        quantizer.quantize(x, dtype=torch.int32)
    with pytest.raises(TypeError, match="nominal dtype"):
        quantizer.make_empty(x.shape, dtype=torch.float64)


def test_an_internal_storage_cannot_require_gradients(quantizer):
    quantizer.internal = True
    with pytest.raises(ValueError, match="requires_grad=True cannot be used with internal=True"):
        quantizer.make_empty((128, 128), requires_grad=True)


def test_flush_to_zero_is_refused(x):
    q = cg.quantize(x, "mxfp8")
    try:
        torch.set_flush_denormal(True)
        for action in (q.dequantize, lambda: q.quantize_(x), lambda: cg.quantize(x, "nvfp4")):
            with pytest.raises(RuntimeError, match="set_flush_denormal"):
                action()
    finally:
        torch.set_flush_denormal(False)
    q.dequantize()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: cg.MXFP8Quantizer(DType.kFloat4E2M1), "must be kFloat8E4M3 or kFloat8E5M2"),
        (lambda: cg.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=3), "1 .* or 2"),
        (lambda: cg.NVFP4Quantizer(DType.kFloat8E4M3), "needs fp4_dtype=kFloat4E2M1"),
        (lambda: cg.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300), "448 or 256"),
        (lambda: cg.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MAX"), "'MAE' or 'MSE'"),
        (lambda: cg.NVFP4Quantizer(with_2d_quantization=True, with_rht=True), "cannot be combined"),
        (lambda: cg.NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True), "cannot be combined"),
        (lambda: cg.NVFP4Quantizer(row_scaled_nvfp4=True, with_amax_reduction=True), "cannot be combined"),
        (lambda: cg.NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), "cannot be combined"),
        (lambda: cg.FormatQuantizer("identity"), "use IdentityQuantizer"),
    ],
)
def test_options_that_cannot_be_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_nbytes_are_those_that_are_stored():
    x = torch.zeros(128, 128)
    assert cg.quantize(x, "mxfp8", columnwise=False).nbytes == 128 * 128 + 128 * 4
    assert cg.quantize(x, "nvfp4").nbytes == 2 * (128 * 64 + 128 * 8 + 4)
    assert cg.quantize(x, "fp8").nbytes == 128 * 128 + 4, "one buffer for both directions"
    both = cg.HybridQuantizer(
        rowwise_quantizer=cg.quantizer_for("mxfp8"), columnwise_quantizer=cg.quantizer_for("nvfp4")
    )(x)
    assert both.nbytes == 128 * 128 + 128 * 4 + 128 * 64 + 128 * 8 + 4


def test_an_empty_shard_takes_part_in_the_reduction(monkeypatch):
    """A rank that skips a collective leaves the others waiting."""
    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: calls.append(tensor.numel()))
    quantizer = cg.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    empty = quantizer(torch.empty(0, 16))
    quantizer.update_quantized(torch.empty(0, 16), empty)
    assert calls == [1, 1]
    empty.quantize_(torch.empty(0, 16))
    assert calls == [1, 1], "the tensor's own quantizer has left the group"


def test_default_dtype_and_device_do_not_matter(x):
    expected = {name: QUANTIZERS[name]()(x.clone()) for name in ("nvfp4_rht", "mxfp8", "nvfp4_4over6_mse", "fp8")}
    try:
        torch.set_default_dtype(torch.float64)
        for name, q in expected.items():
            assert_same_bytes(QUANTIZERS[name]()(x.clone()), q)
            assert torch.equal(q.dequantize(), expected[name].dequantize())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert cg.MXFP8Quantizer(E4M3).make_empty((32, 32)).device.type == "meta"
        assert_same_bytes(cg.MXFP8Quantizer(E4M3)(x), expected["mxfp8"])


# ---- ranks -------------------------------------------------------------------------------------------

REDUCING = {
    "fp8": lambda: cg.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True),
    "nvfp4_rht": lambda: cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_amax_reduction=True),
}


def _quantize_shard(rank: int, path: str, whole: torch.Tensor, results) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    shards = {name: make().quantize(whole.chunk(2)[rank]) for name, make in REDUCING.items()}
    results[rank] = {name: buffers_of(shard) for name, shard in shards.items()}
    assert not any(shard._quantizer.with_amax_reduction for shard in shards.values())
    torch.distributed.destroy_process_group()


def test_shards_share_the_scale_of_the_whole(tmp_path):
    """With amax reduction, each rank's bytes are the rows of quantizing the gathered tensor."""
    whole = torch.randn(64, 64, dtype=torch.bfloat16) * torch.logspace(-2, 2, 64).view(64, 1)
    whole = whole.to(torch.bfloat16)
    with mp.get_context("fork").Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _quantize_shard, args=(str(tmp_path / "store"), whole, results), nprocs=2, start_method="fork"
        )
        shards = [results[rank] for rank in range(2)]
    for name, make in REDUCING.items():
        quantizer = make()
        quantizer.with_amax_reduction = False
        for piece, shard in zip(quantizer(whole).split(32), shards, strict=True):
            for field, buffer in piece.clone()._buffers():
                assert torch.equal(buffer, shard[name][field]), (name, field)


class _Doubling:
    """What a user's class may override to have a say in what is quantized."""

    def quantize(self, tensor, **options):
        return super().quantize(tensor * 2, **options)


class _DoublingImpl:
    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor * 2)


@pytest.mark.parametrize("mixin", [_Doubling, _DoublingImpl])
@pytest.mark.parametrize("name", ["mxfp8", "identity"])
def test_what_a_users_class_overrides_is_asked_by_layers_too(mixin, name):
    """Planes are made without a tensor in between only where nobody has a say in it."""
    x = torch.randn(32, 64)
    plain = cg.quantizer_for(name)
    users = type("Users", (mixin, type(plain)), {})
    quantizer = object.__new__(users)
    quantizer.__dict__.update(plain.copy().__dict__)
    made = quantizer.make_planes(x, rowwise=True, columnwise=False).plane(cg.ROWWISE)
    expected = plain.make_planes(x * 2, rowwise=True, columnwise=False).plane(cg.ROWWISE)
    assert torch.equal(made.data, expected.data)


def test_a_quantizer_that_was_changed_by_itself_is_asked_by_layers_too():
    x, quantizer = torch.randn(32, 64), cg.quantizer_for("mxfp8")
    real = quantizer.quantize_impl
    quantizer.quantize_impl = lambda tensor: real(tensor * 2)
    made = quantizer.make_planes(x, rowwise=True, columnwise=False).plane(cg.ROWWISE)
    expected = cg.quantizer_for("mxfp8").make_planes(x * 2, rowwise=True, columnwise=False).plane(cg.ROWWISE)
    assert torch.equal(made.scale, expected.scale)
