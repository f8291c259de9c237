"""NVFP4 with UE5M3 block scales, against a page of numpy that searches tables."""

import numpy as np
import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.files.description import format_from, plain_format
from crossgrain.formats import E2M1, E4M3, UE5M3, Format, get_format
from crossgrain.formats.encoding import Encoding
from crossgrain.formats.nvfp4_ue5m3 import NVFP4_UE5M3
from crossgrain.gemm import gemm
from crossgrain.gemm.operands import scaling_family
from crossgrain.kernels.marks import mark_nonfinite
from crossgrain.kernels.reference.elements import element_values, round_to_nearest

from ..common.encodings import encoded
from ..common.planes import codes_of

BOTH = pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
# Bits eeeeemmm: (8 + m) * 2**(e - 18), or m * 2**-17 if e is 0; the last byte is NaN.
SCALES = [m * 2.0**-17 for m in range(8)] + [(8 + m) * 2.0 ** (e - 18) for e in range(1, 32) for m in range(8)][:-1]
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
f32 = np.float32


def nearest(values, table):
    """The index of the nearest entry of a table for each number, the even one of two; the last for larger numbers."""
    distance = np.abs(np.minimum(values.astype(np.float64), table[-1])[..., None] - np.array(table))
    is_odd = np.arange(len(table)) % 2
    return np.lexsort((np.broadcast_to(is_odd, distance.shape), distance), axis=-1)[..., 0]


def oracle(x):
    """Scale bytes, codes and decoded numbers of rows, in the order of operations of NVFP4, in fp32."""
    amax = np.abs(x).max()
    encode = f32(6 * 448) / amax
    blocks = x.reshape(len(x), -1, 16)
    wanted = np.abs(blocks).max(-1) * (encode * f32(1 / 6))
    scales = nearest(wanted, SCALES)
    value = np.array(SCALES, f32)[scales]
    with np.errstate(divide="ignore"):
        factor = np.minimum(f32(1) / (value * (f32(1) / encode)), np.finfo(f32).max)
    scaled = blocks * factor[..., None]
    magnitudes = nearest(np.abs(scaled), NUMBERS)
    numbers = np.copysign(np.array(NUMBERS, f32)[magnitudes], blocks)
    decoded = numbers * (value * amax * f32(1 / (6 * 448)))[..., None]
    return scales, (magnitudes | np.signbit(blocks) * 8).reshape(x.shape), decoded.reshape(x.shape)


def spread_out(seed):
    """Rows from 1 down to 2**-36: block scales of every size, also subnormal ones and zero."""
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0, -36, 48).exp2().unsqueeze(1)
    x[5, 16:32] = 0.0
    return x


def test_bytes_of_scales():
    assert UE5M3.values()[:255] == tuple(SCALES) and np.isnan(UE5M3.value(0xFF))
    assert (UE5M3.max, UE5M3.bits, UE5M3.sign_bit, UE5M3.max_code, UE5M3.nan_code) == (114688.0, 8, 0, 0xFE, 0xFF)
    generator = torch.Generator().manual_seed(2)
    ties = (torch.tensor(SCALES[1:]) + torch.tensor(SCALES[:-1])) / 2
    some = torch.cat([torch.tensor(SCALES), ties, ties * (1 + 2**-20), torch.rand(500, generator=generator) * 2**17])
    assert round_to_nearest(some, UE5M3).tolist() == nearest(some.numpy(), SCALES).tolist()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planes_agree_with_the_oracle(direction, dtype):
    x = spread_out(1).to(dtype)
    scales, codes, decoded = oracle(x.float().numpy())
    assert len(np.unique(scales)) > 60 and scales.min() == 0 and 0 < np.sort(np.unique(scales))[1] < 8
    (plane,) = encoded(kernels.REFERENCE, x if direction is ROWWISE else x.t(), [(direction, Encoding(NVFP4_UE5M3))])
    assert np.array_equal(plane.operand_scales().numpy(), scales)
    assert np.array_equal(codes_of(plane).numpy(), codes)
    assert np.array_equal(kernels.decode_operand(plane).numpy(), decoded)


def test_only_small_blocks_differ_from_nvfp4():
    """E4M3 has no normal numbers below 2**-6: from there on both have the same scales and codes."""
    x = spread_out(3)
    mine, usual = cg.quantize(x, "nvfp4_ue5m3"), cg.quantize(x, "nvfp4")
    ours, theirs = (
        element_values(each.plane(ROWWISE).operand_scales(), element)
        for each, element in ((mine, UE5M3), (usual, E4M3))
    )
    large = ours >= 2.0**-6
    assert large.any() and torch.equal(ours[large], theirs[large]) and not torch.equal(ours, theirs)
    same = large.repeat_interleave(16, dim=1)
    assert torch.equal(mine.dequantize()[same], usual.dequantize()[same])
    error, usual_error = ((each.dequantize() - x).abs()[~same].sum() for each in (mine, usual))
    assert error < usual_error


def test_nan_saturates_as_in_nvfp4_and_marks_its_block():
    x = spread_out(4)
    x[3, 20] = float("nan")
    mine, usual = (cg.quantize(x, name).plane(ROWWISE) for name in ("nvfp4_ue5m3", "nvfp4"))
    assert torch.equal(mine.operand_codes()[3], usual.operand_codes()[3])
    mark_nonfinite(x, mine)
    lost = kernels.decode_operand(mine).isnan()
    assert lost[3, 16:32].all() and lost.sum() == 16 and mine.operand_scales()[3, 1] == 0xFF


@pytest.mark.parametrize("which, direction", [("fprop", ROWWISE), ("wgrad", COLUMNWISE)])
def test_products_are_those_of_decoded_numbers(which, direction):
    a, b = (cg.quantize(spread_out(seed), "nvfp4_ue5m3") for seed in (5, 6))
    found = gemm(which, a.plane(direction), b.plane(direction))
    x, y = (each.dequantize(direction=direction).double() for each in (a, b))
    x, y = (x, y.t()) if direction is ROWWISE else (x.t(), y)
    # The sums of at most 64 products are rounded in fp32, and so are decoded numbers and the scale of the product.
    assert ((found - x @ y).abs() <= 70 * 2.0**-24 * (x.abs() @ y.abs())).all()


def test_a_recipe_trains_in_it():
    layer, x = torch.nn.Sequential(torch.nn.Linear(64, 48)), torch.randn(32, 64, requires_grad=True)
    cg.convert(layer, "all: nvfp4_ue5m3(sr)")
    layer(x).square().mean().backward()
    assert layer[0].weight.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_it_is_a_family_of_its_own():
    assert scaling_family(NVFP4_UE5M3) == "NVFP4 with ue5m3 block scales"
    assert not kernels.can_multiply(*(cg.quantize(torch.randn(16, 16), NVFP4_UE5M3).plane(ROWWISE),) * 2)


def test_in_files():
    assert format_from(plain_format(NVFP4_UE5M3)) == NVFP4_UE5M3 == get_format("nvfp4_ue5m3")
    assert "scale_element" not in plain_format(get_format("nvfp4"))


def test_scale_elements_are_checked():
    with pytest.raises(ValueError, match="scale_element needs scale_rule='two_level', got ue5m3 with 'e8m0_up'"):
        Format("wrong", E2M1, (1, 32), "e8m0_up", scale_element=UE5M3)
    with pytest.raises(ValueError, match="scale_bound must be above 0 and at most the largest of them"):
        Format("wrong", E2M1, (1, 16), "two_level", global_amax="tensor", scale_bound=500)
