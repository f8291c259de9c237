"""Which formats bf16 holds: the rule against the numbers that planes decode to."""

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats import BUILT_IN, TableElement, fp8_format, get_format, mxfp8_format
from crossgrain.formats.format import Format
from crossgrain.gemm.exactness import exact_in_bf16
from crossgrain.planes import ROWWISE, empty_plane

QUANTIZED = [fmt for fmt in BUILT_IN if not fmt.is_identity]


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_the_rule_is_right_about_every_byte_of_codes_and_scales(fmt):
    plane = empty_plane(fmt, ROWWISE, (256, 1024), device=torch.device("cpu"))
    plane.data.copy_(torch.arange(plane.data.shape[1]) % 256)  # all codes in a row
    scales = plane.operand_scales()
    if fmt.scale_rule == "fp32":
        scales.copy_(1.0 if fmt.block is None else 1.0 + torch.rand(scales.shape))
    else:
        scales.copy_((torch.arange(scales.shape[0]) % 256).view(-1, 1))  # all scales in a column
    decoded = kernels.decode_operand(kernels.under_scale_one(plane))
    same = decoded.to(torch.bfloat16).float().eq(decoded) | decoded.isnan()
    assert bool(same.all()) == exact_in_bf16(fmt)
    assert bool(same[decoded.abs() >= 2**-126].all()) == exact_in_bf16(fmt, subnormals=False)


def test_what_the_rule_says():
    inexact = {fmt.name for fmt in QUANTIZED if not exact_in_bf16(fmt)}
    with_subnormals_only = {fmt.name for fmt in QUANTIZED if exact_in_bf16(fmt, subnormals=False)} & inexact
    assert with_subnormals_only == {"mxfp8", "mxfp8_e5m2", "mxfp8_2d", "mxfp8_2d_e5m2"}
    assert inexact - with_subnormals_only == {"fp8_block", "fp8_block_e5m2", "fp8_block_2d", "fp8_block_2d_e5m2"}
    wide = TableElement("nine_bits", (*(float(i) for i in range(-127, 128)), 257.0))
    assert not exact_in_bf16(Format("wide", wide))
    assert exact_in_bf16(fp8_format()) and exact_in_bf16(get_format("hifloat8"))


def test_decode_bf16_is_the_decoded_operand_under_a_global_scale_of_one():
    x = torch.randn(64, 64) * 100
    for name in ("fp8", "mxfp8", "nvfp4", "nvfp4_row_scaled", "fp8_block", "mxfp4"):
        for direction, plane in ((d, cg.quantize(x, name).plane(d)) for d in (cg.ROWWISE, cg.COLUMNWISE)):
            values = kernels.decode_bf16(plane)
            assert values.dtype == torch.bfloat16 and values.shape == plane.operand_shape, direction
            assert torch.equal(values, kernels.decode_operand(kernels.under_scale_one(plane)).bfloat16())


def test_mxfp8_numbers_that_bf16_rounds_are_those_below_its_normal_numbers():
    plane = empty_plane(mxfp8_format(), ROWWISE, (1, 32), device=torch.device("cpu"))
    plane.data.copy_(torch.arange(32).view(1, -1))
    plane.operand_scales().fill_(0)  # 2**-127
    exact, rounded = kernels.decode_operand(plane), kernels.decode_bf16(plane)
    assert exact[0, 1] == 2.0**-136 and rounded[0, 1] == 0
    assert (exact != rounded.float()).any() and exact.abs().max() < 2**-126
