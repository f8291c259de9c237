"""FP8 block scaling: fields, shapes, usages."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE

from ..common.quantizers import E4M3, assert_same_bytes


@pytest.mark.parametrize(
    ("name", "row_scale", "column_scale"),
    [("fp8_block", (2, 136), (2, 200)), ("fp8_block_2d", (2, 4), (2, 4))],
)
def test_fields(name, row_scale, column_scale):
    x = torch.randn(2, 67, 200)  # M = 134
    q = cg.quantize(x, name)
    assert q._rowwise_data.shape == (2, 67, 200)
    assert q._columnwise_data.shape == (200, 2, 67), "columnwise data is transposed"
    assert q._rowwise_scale_inv.shape == row_scale
    assert q._columnwise_scale_inv.shape == column_scale
    assert q._rowwise_scale_inv.dtype == torch.float32
    assert q._is_2D_scaled == (name == "fp8_block_2d")
    assert q._fp8_dtype == E4M3
    quantizer = cg.quantizer_for(name)
    assert quantizer.get_scale_shape(x.shape, columnwise=False) == row_scale
    assert quantizer.get_scale_shape(x.shape, columnwise=True) == column_scale
    assert quantizer.get_columnwise_shape(x.shape) == (200, 2, 67)
    assert quantizer.block_len == 128


def test_save_order(x):
    q = cg.quantize(x, "fp8_block")
    expected = [q._rowwise_data, q._columnwise_data, q._rowwise_scale_inv, q._columnwise_scale_inv]
    buffers, _ = q.prepare_for_saving()
    assert all(a is b for a, b in zip(buffers, expected, strict=True))


@pytest.mark.parametrize("shape", [(128, 256), (2, 67, 200)])
def test_tiles_give_columnwise_by_transposition(shape):
    whole = cg.quantize(torch.randn(shape), "fp8_block_2d")
    q = whole.clone()
    q.update_usage(columnwise_usage=False)
    with cg.settings.override(strict=True):
        q.update_usage(True, True)
    assert_same_bytes(q, whole)
    q.update_usage(columnwise_usage=False)
    q._create_columnwise()
    assert_same_bytes(q, whole)


def test_rowwise_from_columnwise_is_an_extension(x):
    whole = cg.quantize(x, "fp8_block_2d")
    q = whole.clone()
    q.update_usage(rowwise_usage=False)
    with cg.settings.override(strict=True), pytest.raises(AssertionError, match="rowwise usage requested"):
        q.update_usage(rowwise_usage=True)
    q.update_usage(rowwise_usage=True)
    assert_same_bytes(q, whole)


def test_one_dimensional_blocks_cannot(x):
    q = cg.quantize(x, "fp8_block", columnwise=False)
    for error in (AssertionError, RuntimeError):
        with pytest.raises(error, match="columnwise usage requested"):
            q.update_usage(columnwise_usage=True)


def test_constructor_with_the_arguments_of_the_field(x):
    q = cg.quantize(x, "fp8_block")
    args = (q._rowwise_data, q._rowwise_scale_inv, q._columnwise_data, q._columnwise_scale_inv, E4M3, None, False)
    storage = cg.Float8BlockwiseQTensorStorage(*args, fake_dtype=torch.bfloat16)
    assert torch.equal(storage.dequantize(), q.dequantize())
    columns = cg.Float8BlockwiseQTensorStorage(None, None, *args[2:], fake_dtype=torch.bfloat16)
    assert columns.shape == x.shape
    assert torch.equal(columns.dequantize(), q.dequantize(direction=COLUMNWISE))


def test_is_quantizable_wants_whole_blocks():
    quantizer = cg.quantizer_for("fp8_block")
    assert quantizer.is_quantizable(torch.empty(128, 256))
    assert not quantizer.is_quantizable(torch.empty(100, 256))
    assert not quantizer.is_quantizable(torch.empty(128, 100))


@pytest.mark.parametrize("shape", [(), (1,), (256,), (311,)])
@pytest.mark.parametrize("block_scaling_dim", [1, 2])
def test_tensors_with_less_than_two_dimensions_are_one_row(shape, block_scaling_dim):
    quantizer = cg.Float8BlockQuantizer(
        cg.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=block_scaling_dim
    )
    x = torch.randn(shape)
    q, row = quantizer(x), quantizer(x.reshape(1, -1))
    empty = quantizer.make_empty(shape)
    quantizer.update_quantized(x, empty)
    assert q.shape == empty.shape == x.shape and not quantizer.is_quantizable(x)
    for name in q._buffer_names:
        buffer = getattr(q, name)
        assert torch.equal(buffer, getattr(empty, name))
        assert torch.equal(buffer.reshape(-1), getattr(row, name).reshape(-1))
    for direction in cg.Direction:
        decoded = q.dequantize(direction=direction)
        assert decoded.shape == x.shape and torch.equal(decoded.reshape(1, -1), row.dequantize(direction=direction))
    changed = q.clone()
    changed.add_(1)
    assert torch.equal(changed.dequantize(), quantizer(q.dequantize() + 1).dequantize())


@pytest.mark.parametrize("make", [lambda: cg.MXFP8Quantizer(cg.DType.kFloat8E4M3), cg.NVFP4Quantizer])
def test_formats_of_whole_blocks_need_two_dimensions(make):
    for shape in ((), (64,)):
        with pytest.raises(ValueError, match=f"it has {len(shape)} dimensions, but needs at least 2"):
            make()(torch.ones(shape))
