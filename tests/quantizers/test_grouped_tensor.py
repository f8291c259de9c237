"""Groups of tensors in one memory."""

import pytest
import torch

import crossgrain as cg
from crossgrain.quantizers.grouped_tensor import GroupedTensor

from ..common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of

NAMES = ["fp8", "fp8_delayed", "mxfp8", "fp8_block", "fp8_block_2d", "nvfp4", "nvfp4_2d"]
make = GroupedTensor.make_grouped_tensor_with_shapes


@pytest.mark.parametrize("transposing", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_a_group_have_the_bytes_they_have_alone(name, transposing):
    with cg.settings.override(non_tn_fp8_gemm=not transposing):
        shapes = [(128, 64), (256, 64)]
        values = [torch.randn(shape) for shape in shapes]
        group = make(2, shapes, QUANTIZERS[name](), dtype=torch.float32)
        members = group.quantize(values)
        assert members is group.split_into_quantized_tensors()
        for member, value in zip(members, values, strict=True):
            assert_same_bytes(member, QUANTIZERS[name]()(value))
        assert (group.columnwise_data is not None) == (transposing or "fp8" not in name[:4] or "block" in name)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_is_one(name):
    group = make(3, [(128, 64)] * 3, QUANTIZERS[name]())
    group.quantize([torch.randn(128, 64) for _ in range(3)])
    before = group.quantized_tensors[2].dequantize()
    for field in ("rowwise_data", "scale_inv", "amax"):
        memory = getattr(group, field)
        if memory is None:
            continue
        assert memory.dim() == 1
        start = memory.data_ptr()
        parts = [b for _, b in group.quantized_tensors[0]._buffers() if b.data_ptr() == start]
        assert len(parts) == 1 and parts[0].numel() * 3 == memory.numel()
    group.rowwise_data[group.rowwise_data.numel() // 3 * 2 :] = 0
    assert not torch.equal(group.quantized_tensors[2].dequantize(), before)


def test_plain_groups_and_what_they_say():
    group = GroupedTensor.make_grouped_tensor(2, torch.tensor([2, 3]), None, 5, 4, dtype=torch.bfloat16)
    assert group.tensor_shapes == [(2, 4), (3, 4)] and group.offsets == [0, 8, 20]
    assert group.first_dims.tolist() == [2, 3] and group.tensor_offsets.tolist() == [0, 8, 20]
    assert not group.all_same_shape() and group.all_same_last_dim() and group.get_common_last_dim() == 4
    with pytest.raises(RuntimeError, match=r"different numbers of rows: \[2, 3\]"):
        group.get_common_first_dim()
    group.quantize([torch.ones(2, 4), torch.full((3, 4), 2.0)])
    assert group.rowwise_data.tolist() == [1.0] * 8 + [2.0] * 12 and group.get_dtype() == torch.bfloat16
    group.quantize([torch.zeros(2, 4), torch.zeros(3, 4)], noop_flag=torch.ones(1))
    assert group.rowwise_data[0] == 1 and group.has_data() and not group.has_columnwise_data()
    same = GroupedTensor.make_grouped_tensor(2, None, None, 6, 4)
    assert same.all_same_shape() and same.get_common_first_dim() == 3 and same.tensor_offsets is None
    memory = torch.arange(12.0)
    view = GroupedTensor.make_grouped_tensor_from_rowwise_data(num_tensors=2, tensor_shape=(2, 3), rowwise_data=memory)
    assert view.quantized_tensors[1].data_ptr() == memory[6:].data_ptr()
    assert torch.equal(view.dequantize().rowwise_data, memory)


def test_usages_say_which_buffers_there_are():
    quantizer = QUANTIZERS["mxfp8"]()
    quantizer.set_usage(rowwise=False)
    group = make(2, [(32, 64)] * 2, quantizer)
    assert not group.has_data() and group.has_columnwise_data() and group.scale_inv is None


def test_what_is_no_group_is_refused():
    mxfp8 = QUANTIZERS["mxfp8"]()
    with pytest.raises(ValueError, match="same number of columns"):
        make(2, [(32, 32), (32, 64)], mxfp8)
    with pytest.raises(ValueError, match="must be matrices, got shape"):
        make(1, [(2, 32, 32)], mxfp8)
    with pytest.raises(ValueError, match="needs 2 shapes, got 1"):
        make(2, [(32, 32)], mxfp8)
    with pytest.raises(TypeError, match="must make codes of one format .* got HybridQuantizer"):
        make(1, [(32, 32)], hybrid_of("mxfp8", "nvfp4"))
    with pytest.raises(ValueError, match="7 rows cannot be divided evenly among 2"):
        GroupedTensor.make_grouped_tensor(2, None, None, 7, 4)
    with pytest.raises(ValueError, match=r"first_dims \[1, 2\] add up to 3 rows, but logical_first_dim is 4"):
        GroupedTensor.make_grouped_tensor(2, torch.tensor([1, 2]), None, 4, 4)
    with pytest.raises(ValueError, match="this group has 2 tensors, got 1"):
        make(2, [(32, 32)] * 2, mxfp8).quantize([torch.randn(32, 32)])
    group = make(2, [(32, 32)] * 2, mxfp8)
    group.quantize([torch.ones(32, 32)] * 2)
    with pytest.raises(ValueError, match=r"tensor 1 of the group has shape \[32, 32\], got \[32, 64\]"):
        group.quantize([torch.zeros(32, 32), torch.zeros(32, 64)])
    assert torch.equal(group.quantized_tensors[0].dequantize(), torch.ones(32, 32))
    with pytest.raises(ValueError, match="have 12 numbers, but rowwise_data has 11"):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(
            num_tensors=2, tensor_shape=(2, 3), rowwise_data=torch.zeros(11)
        )
