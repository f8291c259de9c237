"""Planes without a tensor around them, in the storage of their quantizer."""

import pytest
import torch

import crossgrain as cg
from crossgrain.planes import COLUMNWISE, ROWWISE, PlanePair
from crossgrain.quantizers.holding import holding
from crossgrain.quantizers.hybrid import HybridQuantizer


def hybrid():
    return HybridQuantizer(rowwise_quantizer=cg.MXFP8Quantizer(E4M3), columnwise_quantizer=cg.NVFP4Quantizer())


E4M3 = cg.DType.kFloat8E4M3
QUANTIZERS = {
    "fp8": lambda: cg.Float8CurrentScalingQuantizer(E4M3),
    "mxfp8": lambda: cg.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "identity": cg.IdentityQuantizer,
    "hybrid": hybrid,
}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("directions", [(ROWWISE, COLUMNWISE), (ROWWISE,), (COLUMNWISE,)])
def test_a_storage_that_holds_planes_is_what_the_quantizer_would_have_made(name, directions):
    torch.manual_seed(0)
    x, quantizer = torch.randn(32, 64), QUANTIZERS[name]()
    usages = {direction.value: direction in directions for direction in (ROWWISE, COLUMNWISE)}
    made = quantizer.make_planes(x, **usages)
    held, quantized = holding(quantizer, made, torch.bfloat16), quantizer.storing(**usages).quantize(x)
    assert type(held) is type(quantized) and held.dtype == torch.bfloat16 and held.shape == x.shape
    for direction in directions:
        ours, theirs = held.plane(direction), quantized.plane(direction)
        assert ours.data.data_ptr() == made.plane(direction).data.data_ptr()
        assert torch.equal(ours.data, theirs.data) and ours.format == theirs.format
    assert torch.equal(held.dequantize(dtype=torch.float32), quantized.dequantize(dtype=torch.float32))


def test_planes_of_both_directions_may_come_from_different_calls():
    x, quantizer = torch.randn(32, 64), cg.MXFP8Quantizer(E4M3)
    rows = quantizer.make_planes(x, rowwise=True, columnwise=False).plane(ROWWISE)
    columns = quantizer.make_planes(2 * x, rowwise=False, columnwise=True).plane(COLUMNWISE)
    held = holding(quantizer, PlanePair(rows, columns), torch.float32)
    assert torch.equal(2 * held.dequantize(direction=ROWWISE), held.dequantize(direction=COLUMNWISE))
