"""Casts of single numbers, checked against ml_dtypes and gfloat, and the packing of their codes."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossgrain.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, get_element
from crossgrain.kernels.reference.elements import element_values, round_to_nearest
from crossgrain.kernels.reference.packing import pack, unpack
from crossgrain.kernels.reference.scaling import e8m0_reciprocal, e8m0_round_up, e8m0_value

from ...common.golden_cases import assert_same_bits

ELEMENTS = pytest.mark.parametrize("element", [E4M3, E5M2, E2M1, E2M3, E3M2], ids=lambda element: element.name)
ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
}
GFLOAT = {
    E4M3: gfloat.formats.format_info_ocp_e4m3,
    E5M2: gfloat.formats.format_info_ocp_e5m2,
    E2M1: gfloat.formats.format_info_ocp_e2m1,
    E2M3: gfloat.formats.format_info_ocp_e2m3,
    E3M2: gfloat.formats.format_info_ocp_e3m2,
}

any_bits = st.binary(min_size=1024, max_size=1024).map(lambda raw: np.frombuffer(raw, dtype=np.uint32))
near_one = any_bits.map(lambda bits: bits & 0x87FFFFFF | 0x38000000)  # magnitudes from 2**-15 to 2
fp32_bit_patterns = st.one_of(any_bits, near_one).map(lambda bits: bits.view(np.float32))
quick = settings(max_examples=100, deadline=None)


def our_codes(x, element):
    return round_to_nearest(torch.tensor(x), element).numpy()


def ml_dtypes_codes(x, element):
    """ml_dtypes overflows to NaN or Inf where kernels saturate, hence the clamp. NaN has our canonical code."""
    clamped = np.clip(np.nan_to_num(x, nan=0.0), -element.max, element.max)
    codes = clamped.astype(ML_DTYPES[element]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(element.nan_code), codes)


def gfloat_codes(x, element):
    info = GFLOAT[element]
    rounded = gfloat.round_ndarray(info, np.where(np.isnan(x), 0.0, x).astype(np.float64), sat=True)
    return np.where(np.isnan(x), element.nan_code, gfloat.encode_ndarray(info, rounded)).astype(np.uint8)


@ELEMENTS
@quick
@given(x=fp32_bit_patterns)
def test_cast_of_any_bits_agrees_with_ml_dtypes(element, x):
    np.testing.assert_array_equal(our_codes(x, element), ml_dtypes_codes(x, element))


@ELEMENTS
@quick
@given(x=fp32_bit_patterns)
def test_cast_of_any_bits_agrees_with_gfloat(element, x):
    np.testing.assert_array_equal(our_codes(x, element), gfloat_codes(x, element))


@ELEMENTS
def test_casts_around_every_tie(element):
    """Random bits almost never hit a tie; here are all of them, with their neighbours on both sides."""
    values = np.unique(np.abs(np.array(element.values(), dtype=np.float32)))
    values = values[np.isfinite(values)]
    beyond = np.float32(element.max + (values[-1] - values[-2]))
    ties = (values + np.append(values[1:], beyond)) / 2
    x = np.concatenate([ties + steps * np.spacing(ties) for steps in (-2, -1, 0, 1, 2)])
    x = np.concatenate([x, -x]).astype(np.float32)
    np.testing.assert_array_equal(our_codes(x, element), ml_dtypes_codes(x, element))
    np.testing.assert_array_equal(our_codes(x, element), gfloat_codes(x, element))


@ELEMENTS
def test_every_code_is_the_cast_of_its_value(element):
    codes = torch.arange(1 << element.bits, dtype=torch.int32).to(torch.uint8)
    values = element_values(codes, element)
    expected = codes.clone()
    expected[values.isnan()] = element.nan_code
    expected[values == torch.inf] = element.max_code
    expected[values == -torch.inf] = element.max_code | element.sign_bit
    assert torch.equal(round_to_nearest(values, element), expected)


@pytest.mark.parametrize(
    "name, bits, bias, largest, max_code, min_normal, min_subnormal, nan_code",
    [
        ("e4m3", 8, 7, 448.0, 0x7E, 2**-6, 2**-9, 0x7F),
        ("e5m2", 8, 15, 57344.0, 0x7B, 2**-14, 2**-16, 0x7F),
        ("e2m1", 4, 1, 6.0, 7, 1.0, 0.5, 7),
        ("e2m3", 6, 1, 7.5, 31, 1.0, 0.125, 31),
        ("e3m2", 6, 3, 28.0, 31, 0.25, 0.0625, 31),
        ("e8m0", 8, 127, 2.0**127, 0xFE, 2.0**-126, None, 0xFF),
    ],
)
def test_element_properties(name, bits, bias, largest, max_code, min_normal, min_subnormal, nan_code):
    element = get_element(name)
    assert (element.bits, element.bias, element.max, element.max_code) == (bits, bias, largest, max_code)
    assert element.value(max_code) == largest
    assert 2.0**element.min_exponent == min_normal
    assert element.nan_code == nan_code
    if min_subnormal is not None:
        assert element.value(1) == min_subnormal


def test_special_codes():
    assert np.isnan([E4M3.value(code) for code in (0x7F, 0xFF)]).all()
    assert np.isnan([E5M2.value(code) for code in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)]).all()
    assert (E5M2.value(0x7C), E5M2.value(0xFC)) == (np.inf, -np.inf)
    assert [E2M1.value(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.signbit(E2M1.value(8)) and E2M1.value(15) == -6
    assert np.isnan(E8M0.value(255)) and E8M0.value(0) == 2.0**-127


def test_e2m1_decision_points():
    """Ties go to the even code."""
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, np.nextafter(np.float32(5), np.float32(6))], dtype=np.float32)
    # codes of 0, 1, 1, 2, 2, 4, 4, 6
    np.testing.assert_array_equal(our_codes(x, E2M1), [0, 2, 2, 4, 4, 6, 6, 7])


@ELEMENTS
def test_special_inputs(element):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0], dtype=np.float32)
    top, sign, nan = element.max_code, element.sign_bit, element.nan_code
    np.testing.assert_array_equal(our_codes(x, element), [nan, nan, top, top | sign, top, top | sign, 0, sign])


@ELEMENTS
def test_half_the_smallest_number_rounds_to_zero_with_its_sign(element):
    half = np.float32(element.value(1) / 2)
    x = np.array([half, -half, np.nextafter(half, np.float32(1)), 1e-45, -1e-45], dtype=np.float32)
    np.testing.assert_array_equal(our_codes(x, element), [0, element.sign_bit, 1, 0, element.sign_bit])


POWERS_OF_TWO = np.ldexp(1.0, np.arange(255) - 127)  # what bytes 0..254 stand for, exact in float64


@quick
@given(x=fp32_bit_patterns)
def test_e8m0_is_the_smallest_power_of_two_that_is_large_enough(x):
    x = np.abs(x)
    expected = np.minimum(np.searchsorted(POWERS_OF_TWO, np.nan_to_num(x, nan=0.0, posinf=np.inf)), 254)
    expected = np.where(np.isnan(x), 255, expected).astype(np.uint8)
    np.testing.assert_array_equal(e8m0_round_up(torch.tensor(x)).numpy(), expected)


def test_e8m0_rounding_at_powers_of_two():
    exact = POWERS_OF_TWO.astype(np.float32)
    below, above = np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))
    bytes_ = np.arange(255)
    np.testing.assert_array_equal(e8m0_round_up(torch.tensor(exact)).numpy(), bytes_)
    np.testing.assert_array_equal(e8m0_round_up(torch.tensor(below)).numpy(), bytes_)
    np.testing.assert_array_equal(e8m0_round_up(torch.tensor(above)).numpy(), np.minimum(bytes_ + 1, 254))


def test_e8m0_special_inputs():
    x = torch.tensor([torch.nan, torch.inf, 0.0, 1e-45, 2.0**-127, 3.4e38])
    assert e8m0_round_up(x).tolist() == [255, 254, 0, 0, 0, 254]


def test_e8m0_factor_is_the_exact_reciprocal():
    codes = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    product = e8m0_value(codes).double() * e8m0_reciprocal(codes).double()
    assert (product == 1.0).all()
    assert e8m0_reciprocal(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert_same_bits(e8m0_reciprocal(torch.tensor([254], dtype=torch.uint8)), np.array([2.0**-127], dtype=np.float32))


@pytest.mark.parametrize("bits", [4, 6, 8])
@quick
@given(raw=st.binary(min_size=96, max_size=96))
def test_packing_is_little_endian_and_reversible(bits, raw):
    """A row of packed codes is one long little-endian integer whose digits are the codes."""
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(3, 32) & ((1 << bits) - 1)
    packed = pack(codes, bits)
    assert packed.shape == (3, 32 * bits // 8)
    for row, row_bytes in zip(codes.tolist(), packed, strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert bytes(row_bytes.tolist()) == number.to_bytes(32 * bits // 8, "little")
    assert torch.equal(unpack(packed, bits), codes)


def test_two_fp4_codes_share_a_byte_low_nibble_first():
    codes = torch.tensor([[4, 14, 2, 7]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[0xE4, 0x72]]
