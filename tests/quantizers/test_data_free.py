"""Descriptions of quantized tensors without data."""

import pytest
import torch

import crossgrain as cg

from ..common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of

DESCRIBED = ["fp8", "mxfp8", "fp8_block", "fp8_block_2d", "nvfp4", "nvfp4_2d", "nvfp4_row_scaled"]


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize("columnwise", [True, False])
def test_buffers_are_those_of_a_quantized_tensor(name, columnwise, x):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(columnwise=columnwise)
    q = quantizer(x)
    expected = {field: (tuple(buffer.shape), buffer.dtype) for field, buffer in q._buffers()}
    assert quantizer.inner_tensor_specs(x.shape) == expected
    made = quantizer.alloc_tensors(x.shape)
    assert {field: (tuple(buffer.shape), buffer.dtype) for field, buffer in made.items()} == expected
    assert all(buffer.device.type == "cpu" for buffer in made.values())


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_tensor_can_be_put_together_from_buffers_and_a_description(name, x):
    quantizer = QUANTIZERS[name]()
    q, made = quantizer(x), quantizer.alloc_tensors(x.shape)
    for field, buffer in made.items():
        buffer.copy_(getattr(q, field))
    context = quantizer.create_metadata(x.shape, dtype=x.dtype)
    assert_same_bytes(type(q).__tensor_unflatten__(made, context, x.shape, x.stride()), q)


@pytest.mark.parametrize("internal", [False, True])
def test_metadata_are_the_class_and_the_arguments_that_are_no_buffers(internal, x):
    quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E5M2)
    quantizer.internal = internal
    meta = quantizer.storage_metadata(torch.bfloat16)
    assert meta["cls"] is type(quantizer(x))
    arguments = meta["nontensor_kwargs"]
    assert arguments["fp8_dtype"] == cg.DType.kFloat8E5M2 and arguments["fake_dtype"] == torch.bfloat16
    assert not [each for each in arguments.values() if isinstance(each, torch.Tensor)]
    assert "rowwise_data" not in arguments and "columnwise_scale_inv" not in arguments


def test_what_cannot_be_described_is_refused():
    with pytest.raises(NotImplementedError, match="make_empty"):
        hybrid_of("mxfp8", "nvfp4").inner_tensor_specs((32, 32))
    quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)
    with pytest.raises(NotImplementedError, match="call requires_grad_"):
        quantizer.create_metadata((32, 32), dtype=torch.float32, requires_grad=True)
    quantizer.internal = True
    with pytest.raises(NotImplementedError, match="internal=False"):
        quantizer.create_metadata((32, 32), dtype=torch.float32)
