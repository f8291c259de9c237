"""Identity: the numbers as they are, in the clothes of a quantized tensor."""

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels


def test_keeps_the_input_itself(x):
    q = cg.IdentityQuantizer()(x)
    assert q._hp_data.data_ptr() == x.data_ptr()
    assert torch.equal(q.dequantize(), x)
    assert q.dequantize().data_ptr() == x.data_ptr(), "no copy without a cast"
    assert q.dequantize(dtype=torch.float32).dtype == torch.float32
    assert q.get_data_tensors() == (q._hp_data, None)


def test_casts_only_if_asked(x):
    q = cg.IdentityQuantizer(dtype=torch.float16)(x)
    assert q._hp_data.dtype == torch.float16
    assert q.dtype == q.dequantize().dtype == torch.float16
    assert torch.equal(q.dequantize(), x.half())
    assert cg.IdentityQuantizer(dtype=torch.float16).make_empty((4, 4), dtype=torch.float32).dtype == torch.float16
    assert cg.IdentityQuantizer(dtype=torch.float16).quantize(x, dtype=x.dtype).dtype == x.dtype


def test_has_both_usages_always(x):
    q = cg.quantize(x, "identity", rowwise=False)
    q.update_usage(False, False)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}


def test_views_alias_and_keep_strides(x):
    q = cg.quantize(x.clone(), "identity")
    part = q[:, 3:17]
    assert isinstance(part, cg.IdentityTensor)
    assert part.stride() == (256, 1)
    assert part.storage_offset() == 3
    middle = q.view(4, 32, 256)[:, 1:3]
    assert torch.equal(middle.dequantize(), q.dequantize().view(4, 32, 256)[:, 1:3])
    column = q.as_strided((128,), (256,), 5)
    assert torch.equal(column.dequantize(), q.dequantize()[:, 5])
    with torch.no_grad():
        part.copy_(torch.ones(128, 14))
    assert (q.dequantize()[:, 3:17] == 1).all()
    assert [piece.shape for piece in q.split(100)] == [(100, 256), (28, 256)]


@pytest.mark.parametrize("relabel", [lambda q: q.to(torch.float32), lambda q: q.to_dtype(torch.float32)])
def test_another_dtype_takes_writes_in_that_dtype(x, relabel):
    q = relabel(cg.quantize(x.clone(), "identity"))
    exact = torch.full(x.shape, 1.0 + 2**-20)
    q.quantize_(exact)
    assert torch.equal(q.dequantize(), exact)
    kept = relabel(cg.IdentityQuantizer(dtype=torch.float16)(x))
    assert kept._hp_data.dtype == torch.float16, "that is the quantizer's choice"


def test_a_parameter_takes_writes_in_its_dtype(x):
    parameter = torch.nn.Parameter(cg.quantize(x.clone(), "identity"))
    parameter.dtype = torch.float32
    with torch.no_grad():
        parameter.copy_(torch.full(x.shape, 1.0 + 2**-20))
    assert torch.equal(parameter.dequantize(), torch.full(x.shape, 1.0 + 2**-20))


def test_update_copies_in_place_or_rebinds(x):
    q = cg.quantize(x.clone(), "identity")
    buffer = q._hp_data
    q.quantize_(x * 2)
    assert q._hp_data is buffer
    assert torch.equal(buffer, x * 2)
    q.quantize_(x.float() * 3)
    assert q._hp_data is buffer, "in-place operations write through, in the dtype of the buffer"
    with pytest.raises(ValueError, match="a slice of a torch.bfloat16"):
        cg.IdentityQuantizer().update_quantized(x[:5].float(), q[:5])
    cg.IdentityQuantizer().update_quantized(x.float(), q)
    assert q._hp_data.dtype == torch.float32
    source = x.float()
    cg.IdentityQuantizer().update_quantized(source, q)
    assert q._hp_data.data_ptr() != source.data_ptr(), "an update never aliases its source"
    with pytest.raises(ValueError, match="can only write to an IdentityTensor, got a MXFP8Tensor"):
        cg.IdentityQuantizer().update_quantized(x, cg.quantize(x, "mxfp8"))
    with pytest.raises(ValueError, match="shape"):
        q.quantize_(x[:5])


def test_a_mutating_operation_that_fails_changes_nothing(x):
    q = cg.quantize(x.clone(), "identity")
    with pytest.raises(RuntimeError):
        q.t_()
    assert torch.equal(q.dequantize(), x)


def test_storage_constructor(x):
    storage = cg.IdentityTensorStorage(x)
    assert storage._dtype == x.dtype
    assert storage.shape == x.shape
    assert torch.equal(storage.dequantize(), x)


def test_operands_of_strided_views(x):
    q = cg.quantize(x.view(4, 32, 256).transpose(0, 1), "identity")
    expected = x.view(4, 32, 256).transpose(0, 1).reshape(128, 256).float()
    assert torch.equal(kernels.decode_operand(q.plane(cg.ROWWISE)), expected)
    assert torch.equal(kernels.decode_operand(q.plane(cg.COLUMNWISE)), expected.t())
    part = cg.quantize(x.view(4, 32, 256), "identity")[:, 2:4]
    assert torch.equal(kernels.decode_operand(part.plane(cg.ROWWISE)), part.dequantize().reshape(8, 256).float())
