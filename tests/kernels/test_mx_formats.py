"""Microscaling blocks: OCP formats against gfloat, MXFP8 against an oracle written from the specification."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossgrain import kernels
from crossgrain.formats import E4M3, E5M2, get_format, mxfp8_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels.reference.packing import unpack
from crossgrain.kernels.reference.scaling import e8m0_up_scales
from crossgrain.planes import COLUMNWISE, ROWWISE

from ..common.golden_cases import assert_same_bits, encoded

GFLOAT = {
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
}
ML_DTYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
OCP = pytest.mark.parametrize("name", GFLOAT)
MXFP8 = pytest.mark.parametrize("element", ML_DTYPES, ids=lambda element: element.name)
BOTH_DIRECTIONS = pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
quick = settings(max_examples=60, deadline=None)


@st.composite
def blocks(draw, count, finite=False):
    """[count, 32] fp32: any bits at all, or exponents close together, so that most codes are not zero."""
    bits = np.frombuffer(draw(st.binary(min_size=count * 128, max_size=count * 128)), dtype=np.uint32)
    if draw(st.booleans()):
        lowest = draw(st.integers(0, 247))
        bits = bits & 0x807FFFFF | (lowest + (bits >> 23 & 7)) << 23
    if finite:
        bits = np.where(bits & 0x7F800000 == 0x7F800000, bits & 0x80FFFFFF, bits)
    return bits.astype(np.uint32).view(np.float32).reshape(count, 32)


def plane_of(x, fmt, direction):
    """Blocks along the rows of ``x`` whatever the direction: a columnwise plane gets the transpose."""
    x = torch.tensor(x)
    return encoded(x if direction is ROWWISE else x.t(), Encoding(fmt), direction)


@OCP
@BOTH_DIRECTIONS
@quick
@given(x=blocks(count=2, finite=True))
def test_ocp_blocks_agree_with_gfloat(name, direction, x):
    info, exact = GFLOAT[name], x.astype(np.float64)  # in float64, so that gfloat's log2 and quotients are exact
    scales = [gfloat.compute_scale_amax(info.etype.emax, block) for block in exact]
    expected = np.array([list(gfloat.encode_block(info, s, block / s)) for s, block in zip(scales, exact, strict=True)])
    values = np.array([gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in exact])

    plane = plane_of(x, get_format(name), direction)
    np.testing.assert_array_equal(plane.operand_scales().numpy(), expected[:, :1])
    np.testing.assert_array_equal(unpack(plane.operand_codes(), plane.format.element.bits).numpy(), expected[:, 1:])
    assert_same_bits(kernels.decode_operand(plane), values.astype(np.float32))


def mxfp8_oracle(x, element):
    """Scale byte, codes and values of each row of 32, in numpy and from the definition: the smallest power of two
    that is at least amax / max, found by search; then a cast with ml_dtypes."""
    numbers = np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)
    wanted = np.abs(numbers).max(axis=1, keepdims=True) * np.float32(1 / element.max)
    powers = np.ldexp(1.0, np.arange(255) - 127)
    scale = np.minimum(np.searchsorted(powers, wanted.astype(np.float64)), 254)
    scaled = np.clip(numbers * np.ldexp(1.0, 127 - scale), -element.max, element.max)
    codes = scaled.astype(np.float32).astype(ML_DTYPES[element])
    with np.errstate(over="ignore"):  # the code for Inf decodes to Inf
        values = (codes.astype(np.float64) * np.ldexp(1.0, scale - 127)).astype(np.float32)
    codes = np.where(np.isnan(x), np.uint8(0x7F), codes.view(np.uint8))
    return scale.astype(np.uint8), codes, np.where(np.isnan(x), np.float32(np.nan), values)


@MXFP8
@BOTH_DIRECTIONS
@quick
@given(x=blocks(count=8))
def test_mxfp8_agrees_with_the_oracle(element, direction, x):
    scale, codes, values = mxfp8_oracle(x, element)
    plane = plane_of(x, mxfp8_format(element), direction)
    np.testing.assert_array_equal(plane.operand_scales().numpy(), scale)
    np.testing.assert_array_equal(plane.operand_codes().numpy(), codes)
    assert_same_bits(kernels.decode_operand(plane), values)


@MXFP8
@quick
@given(x=blocks(count=8))
def test_mxfp8_tiles_share_the_scale_of_their_largest_number(element, x):
    """A 32x32 tile is a block of 1024, and both directions hold the same codes."""
    x = np.tile(x, (4, 1))
    encoding = Encoding(mxfp8_format(element, two_d=True))
    row, column = (encoded(torch.tensor(x), encoding, direction) for direction in (ROWWISE, COLUMNWISE))
    scale, codes, values = mxfp8_oracle(x.reshape(1, -1), element)
    assert (row.operand_scales().numpy() == scale).all() and row.operand_scales().shape == (32, 1)
    assert torch.equal(row.data, column.data) and torch.equal(row.operand_scales(), column.operand_scales())
    np.testing.assert_array_equal(row.data.numpy(), codes.reshape(x.shape))
    assert_same_bits(kernels.decode(column, torch.float32), values.reshape(x.shape))


@pytest.mark.parametrize(
    "amax, byte",
    [
        (0.0, 0),
        (1e-45, 0),
        (448 * 2.0**-127, 0),
        (0.75, 118),
        (1.0, 119),
        (3.0, 120),
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(449)), 128),
        (896.0, 128),
        (3.4e38, 247),
        (np.inf, 254),
    ],
)
def test_documented_mxfp8_scales(amax, byte):
    assert e8m0_up_scales(torch.tensor([amax], dtype=torch.float32), E4M3).stored.item() == byte


def test_documented_mxfp8_block():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([3.0, -1.0, 0.1, 0.003])
    plane = encoded(x, Encoding(mxfp8_format()), ROWWISE)
    assert plane.operand_scales().item() == 120
    assert plane.data[0, :5].tolist() == [0x7C, 0xF0, 0x55, 0x2C, 0]
    assert kernels.decode(plane, torch.float32)[0, :5].tolist() == [3.0, -1.0, 0.1015625, 0.0029296875, 0.0]


def test_round_up_never_saturates_and_floor_does():
    """A scale rounded up keeps the largest number in range; rounded down, it can leave it beyond the last code."""
    x = torch.full((1, 32), 1.99)
    up = encoded(x, Encoding(mxfp8_format()), ROWWISE)
    assert kernels.decode(up, torch.float32)[0, 0] == 2.0
    down = encoded(x, Encoding(get_format("mxfp4")), ROWWISE)
    assert kernels.decode(down, torch.float32)[0, 0] == 1.5


@MXFP8
def test_mxfp8_keeps_numbers_below_the_smallest_normal(element):
    """The scale byte 0 stands for 2**-127, so the factor is 2**127, not 1: subnormal numbers are not lost."""
    x = torch.full((1, 32), 1e-40)
    plane = encoded(x, Encoding(mxfp8_format(element)), ROWWISE)
    assert plane.operand_scales().item() == 0
    decoded = kernels.decode(plane, torch.float32)
    assert (decoded > 0).all()
    torch.testing.assert_close(decoded, x, rtol=2.0 ** -(element.mantissa_bits + 1), atol=0)


@OCP
def test_infinity_in_an_ocp_block_stays_infinite_and_outweighs_the_rest(name):
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([torch.inf, 1.0, -torch.inf])
    decoded = kernels.decode(encoded(x, Encoding(get_format(name)), ROWWISE), torch.float32)
    assert decoded[0, :3].tolist() == [torch.inf, 0.0, -torch.inf]


@OCP
def test_nan_in_an_ocp_block_is_the_largest_number_and_does_not_touch_the_scale(name):
    x = torch.ones(1, 32)
    reference = encoded(x, Encoding(get_format(name)), ROWWISE)
    x[0, 5] = torch.nan
    plane = encoded(x, Encoding(get_format(name)), ROWWISE)
    assert torch.equal(plane.scale, reference.scale)
    element = plane.format.element
    codes = unpack(plane.operand_codes(), element.bits)
    assert codes[0, 5] == element.max_code
    assert (codes[0] == codes[0, 0]).sum() == 31


@OCP
def test_six_and_four_bit_planes_are_packed_along_the_blocks(name):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    fmt = get_format(name)
    row, column = (encoded(x, Encoding(fmt), direction) for direction in (ROWWISE, COLUMNWISE))
    assert row.data.shape == (32, 64 * fmt.element.bits // 8)
    assert column.data.shape == (64, 32 * fmt.element.bits // 8)
    assert row.scale.shape == (128, 4) and column.scale.shape == (128, 4)
    as_rows = encoded(x.t().contiguous(), Encoding(fmt), ROWWISE)
    assert torch.equal(column.data, as_rows.data) and torch.equal(column.scale, as_rows.scale)
