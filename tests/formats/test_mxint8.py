"""MXINT8 against gfloat, byte for byte, and everything that is done with formats."""

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossgrain import COLUMNWISE, ROWWISE, get_format, kernels
from crossgrain.formats.encoding import Encoding
from crossgrain.formats.mxint8 import INT8, MXINT8
from crossgrain.kernels.reference.elements import element_values, round_to_nearest

from ..common.golden_cases import assert_same_bits, encoded

INFO = gfloat.formats.format_info_mxint8
BOTH_DIRECTIONS = pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)


@st.composite
def blocks(draw):
    """[2, 32] finite fp32, with exponents close together, so that most codes are not zero."""
    bits = np.frombuffer(draw(st.binary(min_size=256, max_size=256)), dtype=np.uint32)
    lowest = draw(st.integers(0, 246))
    return (bits & 0x807FFFFF | (lowest + (bits >> 23 & 7)) << 23).astype(np.uint32).view(np.float32).reshape(2, 32)


def oracle(x):
    """Scale bytes, codes and values of each row of 32 by gfloat, in float64 so that it is exact.

    The one difference: what gfloat saturates to -128, which the specification leaves open, is -127 here.
    """
    exact = x.astype(np.float64)
    scales = [gfloat.compute_scale_amax(INFO.etype.emax, block) for block in exact]
    scaled = [np.maximum(block / s, -127 / 64) for s, block in zip(scales, exact, strict=True)]
    stored = np.array([list(gfloat.encode_block(INFO, s, block)) for s, block in zip(scales, scaled, strict=True)])
    values = np.array([list(gfloat.decode_block(INFO, map(int, block))) for block in stored])
    return stored[:, :1], stored[:, 1:], values.astype(np.float32)


@BOTH_DIRECTIONS
@settings(max_examples=60, deadline=None)
@given(x=blocks())
def test_blocks_agree_with_gfloat(direction, x):
    scales, codes, values = oracle(x)
    tensor = torch.tensor(x)
    plane = encoded(tensor if direction is ROWWISE else tensor.t(), Encoding(MXINT8), direction)
    np.testing.assert_array_equal(plane.operand_scales().numpy(), scales)
    np.testing.assert_array_equal(plane.operand_codes().numpy(), codes)
    assert_same_bits(kernels.decode_operand(plane), values)


def test_every_code_means_what_gfloat_says():
    values = gfloat.decode_ndarray(gfloat.formats.format_info_ocp_int8, np.arange(256))
    np.testing.assert_array_equal(np.array(INT8.values()), values)
    assert (INT8.max, INT8.max_exponent, INT8.max_code, INT8.bits) == (127 / 64, 0, 0x7F, 8)


def test_the_code_of_minus_two_is_read_and_never_written():
    """So that x and -x always have opposite codes."""
    assert element_values(torch.tensor([0x80]), INT8).item() == -2.0
    v = torch.tensor([-1.984375, -1.99, -2.0, -torch.inf])
    assert round_to_nearest(v, INT8).tolist() == [0x81] * 4
    assert round_to_nearest(-v, INT8).tolist() == [0x7F] * 4


def test_ties_go_to_even_codes():
    v = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]) / 64
    assert round_to_nearest(v, INT8).tolist() == [0, 2, 2, 0, 0xFE, 0xFE]


@BOTH_DIRECTIONS
def test_zeros_subnormals_infinity_and_nan(direction):
    x = torch.zeros(3, 32)
    x[1, :2] = torch.tensor([1e-40, -1e-44])
    x[2, :3] = torch.tensor([torch.inf, torch.nan, 1.0])
    plane = encoded(x if direction is ROWWISE else x.t(), Encoding(MXINT8), direction)
    decoded = kernels.decode_operand(plane)
    assert plane.operand_scales().flatten().tolist() == [0, 0, 254]
    assert not decoded[0].any() and (decoded[1, 0] - 1e-40).abs() <= 2.0**-127 / 128
    # There is no infinity and no NaN: both are the largest number, and only the first counts for the scale.
    assert decoded[2, 0] == 127 / 64 * 2.0**127 and plane.operand_codes()[2, :3].tolist() == [0x7F, 0x7F, 0]


def test_it_is_registered_and_stored_like_mxfp8():
    assert get_format("mxint8") is MXINT8
    assert MXINT8.bits_per_element == 8.25 and not MXINT8.transposes
