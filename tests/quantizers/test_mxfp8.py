"""MXFP8: fields, shapes, save order, usages."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE

from ..common.quantizers import E4M3, E5M2, assert_same_bytes


def test_fields(x):
    q = cg.quantize(x[:96].view(3, 32, 256), "mxfp8")
    assert q._rowwise_data.shape == (3, 32, 256)
    assert q._columnwise_data.shape == (3, 32, 256), "columnwise data is not transposed"
    assert q._rowwise_scale_inv.shape == (128, 8)
    assert q._columnwise_scale_inv.shape == (4, 256)
    assert all(buffer.dtype == torch.uint8 for _, buffer in q._buffers())
    assert q._fp8_dtype == E4M3
    assert q._with_gemm_swizzled_scales is False
    quantizer = cg.MXFP8Quantizer(E4M3)
    assert quantizer.get_scale_shape((96, 256), columnwise=False) == (128, 8)
    assert quantizer.get_scale_shape((96, 256), columnwise=True) == (4, 256)


def test_save_order(x):
    q = cg.quantize(x, "mxfp8")
    expected = [q._rowwise_data, q._columnwise_data, q._rowwise_scale_inv, q._columnwise_scale_inv]
    buffers, _ = q.prepare_for_saving()
    assert all(a is b for a, b in zip(buffers, expected, strict=True))


def test_usages_only_drop(x):
    q = cg.quantize(x, "mxfp8")
    q.update_usage()
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    q.update_usage(columnwise_usage=False)
    assert q._columnwise_data is None
    assert q._columnwise_scale_inv is None
    with pytest.raises(RuntimeError, match="columnwise usage requested.*only mxfp8 rowwise data"):
        q.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}, "a refused request changes nothing"


def test_tiles_give_the_other_direction(x):
    """With 32x32 tiles both directions have the same codes and scales, so either follows from the other."""
    for direction in (ROWWISE, COLUMNWISE):
        whole = cg.quantize(x, "mxfp8_2d")
        drop, ask = {f"{direction.value}_usage": False}, {f"{direction.value}_usage": True}
        q = whole.clone()
        q.update_usage(**drop)
        q.update_usage(**ask)
        assert_same_bytes(q, whole)
        q.update_usage(**drop)
        with cg.settings.override(strict=True), pytest.raises(RuntimeError, match="usage requested"):
            q.update_usage(**ask)


def test_constructor_with_the_arguments_of_the_field(x):
    q = cg.quantize(x, "mxfp8_e5m2")
    args = (q._rowwise_data, q._rowwise_scale_inv, q._columnwise_data, q._columnwise_scale_inv, E5M2, None, False)
    storage = cg.MXFP8TensorStorage(*args)
    assert storage.shape == x.shape
    assert torch.equal(storage.dequantize(), q.dequantize(dtype=torch.float32))
    assert torch.equal(
        storage.dequantize(direction=COLUMNWISE), q.dequantize(dtype=torch.float32, direction=COLUMNWISE)
    )
    only_columns = cg.MXFP8TensorStorage(None, None, *args[2:])
    assert only_columns.shape == x.shape
    with pytest.raises(ValueError, match="unswizzle_scales"):
        cg.MXFP8TensorStorage(*args[:-1], True)


def test_tensors_from_data_made_elsewhere(x):
    q = cg.quantize(x, "mxfp8", columnwise=False)
    made = cg.MXFP8Quantizer(E4M3).create_tensor_from_data(q._rowwise_data, q._rowwise_scale_inv, torch.bfloat16)
    assert isinstance(made, cg.MXFP8Tensor)
    assert torch.equal(made.dequantize(), q.dequantize())


def test_is_quantizable():
    quantizer = cg.MXFP8Quantizer(E4M3)
    assert quantizer.is_quantizable(torch.empty(2, 16, 64))
    assert not quantizer.is_quantizable(torch.empty(31, 64))
    assert not quantizer.is_quantizable(torch.empty(32, 48))
    assert not quantizer.is_quantizable(torch.empty(32))


def test_strict_mode_needs_both_dimensions():
    row = torch.randn(1, 64)
    cg.quantize(row, "mxfp8", columnwise=False)
    with cg.settings.override(strict=True), pytest.raises(ValueError, match=r"\(M\) is 1, .* 32"):
        cg.quantize(row, "mxfp8", columnwise=False)


def test_swizzled_scales_round_trip(x):
    q = cg.quantize(x, "mxfp8")
    compact = q._rowwise_scale_inv[:128, :8]
    assert torch.equal(cg.unswizzle_scales(cg.swizzle_scales(compact), 128, 8), compact)
    with pytest.raises(ValueError, match=r"must have shape \[128, 4\], got \[128, 8\]"):
        cg.unswizzle_scales(cg.swizzle_scales(compact), 64, 4)
    with pytest.raises(ValueError, match="matrix"):
        cg.swizzle_scales(compact[0])
