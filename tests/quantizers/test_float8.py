"""Per-tensor FP8: its fields, one buffer or two, delayed and current scaling."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.kernels.choice import using_backend

from ..common.quantizers import E4M3, E5M2, assert_same_bytes


@pytest.fixture
def transposing():
    """Hardware that multiplies only one layout: columnwise data is a transposed copy."""
    with cg.settings.override(non_tn_fp8_gemm=False):
        yield


@pytest.fixture
def one_buffer():
    with cg.settings.override(non_tn_fp8_gemm=True):
        yield


def test_the_switch_follows_the_pretended_capability():
    assert cg.is_non_tn_fp8_gemm_supported()
    with cg.settings.override(compute_capability=(9, 0)):
        assert cg.get_device_compute_capability() == (9, 0)
        assert not cg.is_non_tn_fp8_gemm_supported()
        with cg.settings.override(non_tn_fp8_gemm=True):
            assert cg.is_non_tn_fp8_gemm_supported()
    assert cg.is_non_tn_fp8_gemm_supported()


def test_fields_where_one_buffer_serves_both(x, one_buffer):
    for usages in ({}, {"rowwise": False}, {"columnwise": False}):
        q = cg.quantize(x, "fp8", **usages)
        assert q._data.shape == x.shape
        assert q._data.dtype == torch.uint8
        assert q._transpose is None
        assert q._transpose_invalid
        assert q._scale_inv.shape == (1,)
        assert q._fp8_dtype == E4M3
        assert q.get_usages() == {"rowwise": True, "columnwise": True}
        assert q.plane(COLUMNWISE).data is q._data


def test_fields_where_a_transposed_copy_is_kept(transposing):
    x = torch.randn(4, 8, 16)
    both = cg.quantize(x, "fp8")
    assert both._data.shape == (4, 8, 16)
    assert both._transpose.shape == (16, 4, 8)
    assert not both._transpose_invalid
    assert torch.equal(both._transpose, both._data.movedim(-1, 0))
    row = cg.quantize(x, "fp8", columnwise=False)
    assert row._transpose is None
    assert row.get_usages() == {"rowwise": True, "columnwise": False}
    column = cg.quantize(x, "fp8", rowwise=False)
    assert column._data is None
    assert column.get_usages() == {"rowwise": False, "columnwise": True}
    assert column.shape == x.shape
    assert torch.equal(column.dequantize(), both.dequantize())


def test_save_order(x, transposing):
    q = cg.quantize(x, "fp8")
    expected = [q._data, q._transpose, q._scale_inv]
    buffers, _ = q.prepare_for_saving()
    assert all(a is b for a, b in zip(buffers, expected, strict=True))


def test_usages_transposing(x, transposing):
    q = cg.quantize(x, "fp8", columnwise=False)
    whole = cg.quantize(x, "fp8")
    q.update_usage(columnwise_usage=True)
    assert_same_bytes(q, whole)
    q.update_usage(rowwise_usage=False)
    assert q._data is None
    assert q._scale_inv is not None
    assert torch.equal(q.dequantize(), whole.dequantize())
    q.update_usage(rowwise_usage=True)  # byte for byte the transpose of the transpose
    assert_same_bytes(q, whole)
    q.update_usage(False, False)
    with pytest.raises(RuntimeError, match="there is nothing"):
        q.update_usage(columnwise_usage=True)


def test_usages_with_one_buffer(x, one_buffer):
    q = cg.quantize(x, "fp8")
    q.update_usage(rowwise_usage=False)
    assert q._data is not None, "columnwise use still needs the only buffer"
    q.update_usage(columnwise_usage=True)
    q.update_usage(False, False)
    assert q._data is None
    with pytest.raises(RuntimeError, match="there is nothing"):
        q.update_usage(rowwise_usage=True)


def test_a_transposed_copy_becomes_the_one_buffer(x):
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = cg.quantize(x, "fp8", rowwise=False)
        expected = q.dequantize()
    with cg.settings.override(non_tn_fp8_gemm=True):
        q.update_usage(rowwise_usage=True)
        assert q._transpose is None
        assert torch.equal(q.dequantize(), expected)


def test_strict_mode_refuses_what_transformer_engine_refuses(x, transposing):
    column = cg.quantize(x, "fp8", rowwise=False)
    row = cg.quantize(x, "fp8", columnwise=False)
    with cg.settings.override(strict=True):
        with pytest.raises(NotImplementedError, match="columnwise plane alone"):
            cg.quantize(x, "fp8", rowwise=False)
        assert torch.equal(column.dequantize(), row.dequantize())  # this it can, too
        with pytest.raises(RuntimeError, match="rowwise usage requested"):
            column.update_usage(rowwise_usage=True)
        row.update_usage(columnwise_usage=True)  # this it can


def test_transposes_can_be_dropped_and_made(x, transposing):
    q = cg.quantize(x, "fp8")
    expected = q._transpose.clone()
    q._transpose_invalid = True
    assert q.plane(COLUMNWISE) is None
    q._create_transpose()
    assert torch.equal(q._transpose, expected)
    q.remove_caches()
    assert q._transpose is None
    q.update_usage(columnwise_usage=True)
    q.update_usage(rowwise_usage=False)
    q.remove_caches()
    assert q._transpose is not None, "the only copy is not a cache"
    with pytest.raises(RuntimeError, match="has no rowwise codes to make the transposed copy from"):
        q._create_transpose()


def test_rowwise_bytes_take_any_shape(x, one_buffer):
    q = cg.quantize(x, "fp8")
    assert torch.equal(q.view(256, 128).dequantize(), q.dequantize().view(256, 128))


def test_a_view_never_leaves_a_transposed_copy_behind(x, transposing):
    """Writing through a view without the transposed copy would leave the original with a stale one."""
    q = cg.quantize(x, "fp8")
    with pytest.raises(RuntimeError, match="last dimension"):
        q.view(256, 128)


def test_transposed_bytes_alone_keep_their_last_dimension(x):
    codes = cg.quantize(x, "fp8")._data
    q = cg.Float8Tensor(
        x.shape, x.dtype, data=None, data_transpose=codes.t().contiguous(), fp8_scale_inv=torch.ones(1), fp8_dtype=E4M3
    )
    assert q.view(2, 64, 256)._transpose.shape == (256, 2, 64)
    with pytest.raises(NotImplementedError, match="it has only a transposed columnwise plane"):
        q.view(256, 128)


def test_current_scaling_records_amax_and_scale(x):
    quantizer = cg.Float8CurrentScalingQuantizer(E4M3)
    q = quantizer(x)
    assert quantizer.amax == x.float().abs().max()
    assert quantizer.scale == 448.0 / quantizer.amax
    assert torch.equal(q._scale_inv, 1.0 / quantizer.scale)
    existing = cg.Float8CurrentScalingQuantizer(E4M3, use_existing_amax=True, amax=torch.tensor([448.0]))
    assert existing(x)._scale_inv == 1.0
    assert existing.amax == 448.0


def test_delayed_scaling_uses_the_given_scale_and_accumulates_amax():
    scale, amax = torch.tensor([2.0]), torch.tensor([0.5])
    quantizer = cg.Float8Quantizer(scale, amax, E5M2)
    q = quantizer(torch.tensor([[1.0, -3.0]]))
    assert q._scale_inv == 0.5
    assert q.dequantize().tolist() == [[1.0, -3.0]]
    assert amax == 3.0
    quantizer(torch.tensor([[2.0]]))
    assert amax == 3.0, "several casts of a step keep the largest"
    quantizer.calibrate(torch.tensor([[-7.0, float("nan")]]))
    assert amax == 7.0
    assert quantizer.copy().scale is scale
    q.quantize_(torch.tensor([[10.0, 0.0]]))
    assert amax == 10.0


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_given_scale_of_another_dtype_is_rounded_to_fp32(dtype, backend):
    x, scale = torch.tensor([[1.0, -3.0]], dtype=dtype), torch.tensor([1 / 3], dtype=torch.float64)
    with using_backend(backend):
        q, wanted = (cg.Float8Quantizer(each, torch.zeros(1), E4M3)(x) for each in (scale, scale.float()))
    assert torch.equal(q._data, wanted._data)
    assert torch.equal(q._scale_inv, wanted._scale_inv)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0])
def test_a_scale_that_makes_nans_makes_them_in_the_transposed_copy_too(scale, backend, transposing):
    quantizer = cg.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3)
    row = torch.tensor([float("inf"), 1.0, 0.0])
    with using_backend(backend):
        q = quantizer(row.expand(40, 3))
    assert torch.equal(q._data == 127, (row * scale).isnan().expand(40, 3))
    assert torch.equal(q._transpose, q._data.t())


def test_delayed_scaling_may_view_into_a_history():
    history, scale = torch.zeros(4, 3), torch.ones(3)
    quantizer = cg.Float8Quantizer(scale[1:2], history[0, 1:2], E4M3)
    quantizer(torch.full((2, 2), 5.0))
    assert history[0].tolist() == [0.0, 5.0, 0.0]


def test_tensors_from_data_made_elsewhere(x):
    quantizer = cg.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3)
    codes = torch.randint(0, 120, (8, 8), dtype=torch.uint8)
    q = quantizer.create_tensor_from_data(codes, fake_dtype=torch.bfloat16, requires_grad=True)
    assert isinstance(q, cg.Float8Tensor)
    assert q.requires_grad
    expected = codes.view(torch.float8_e4m3fn).float() * 0.25
    assert torch.equal(q.dequantize(dtype=torch.float32), expected)
    storage = quantizer.create_tensor_from_data(codes.view(torch.float8_e4m3fn), internal=True)
    assert not isinstance(storage, torch.Tensor)
    assert torch.equal(storage.dequantize(), expected)
    assert quantizer.get_columnwise_shape((2, 3, 4)) == (4, 2, 3)


def test_constructor_with_the_arguments_of_the_field():
    codes = torch.randint(0, 120, (8, 16), dtype=torch.uint8)
    q = cg.Float8Tensor((8, 16), torch.float32, data=codes, fp8_scale_inv=torch.tensor([0.5]), fp8_dtype=E4M3)
    assert torch.equal(q.dequantize(), codes.view(torch.float8_e4m3fn).float() * 0.5)
    storage = cg.Float8TensorStorage(codes, torch.tensor([0.5]), 7, torch.bfloat16)
    assert storage.shape == (8, 16)
    assert storage._dtype == torch.bfloat16
    column = cg.Float8TensorStorage(None, torch.tensor([0.5]), E4M3, data_transpose=codes)
    assert column.shape == (16, 8)
    assert torch.equal(column.dequantize(), codes.view(torch.float8_e4m3fn).float().t() * 0.5)
    with pytest.raises(ValueError, match="needs shape=..."):
        cg.Float8TensorStorage(None, None, E4M3)


def test_clear_keeps_the_scale(x):
    q = cg.quantize(x, "fp8")
    q.clear()
    assert q._data.numel() == 0
    assert q._scale_inv.numel() == 1


def test_an_update_writes_the_transposed_copy_too(x, transposing):
    q = cg.quantize(x, "fp8")
    with torch.no_grad():
        q.copy_(x * 3)
    assert torch.equal(q.dequantize(direction=ROWWISE), q.dequantize(direction=COLUMNWISE))
    assert_same_bytes(q, cg.quantize(x * 3, "fp8"))
