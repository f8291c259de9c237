"""HiFloat8 against a decoder written bit by bit from the paper (arXiv 2409.16626), which shares no code with ours."""

import math

import numpy as np
import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats.encoding import Encoding
from crossgrain.formats.hifloat8 import HIF8, HIFLOAT8
from crossgrain.kernels.reference.elements import element_values, round_to_nearest

from ..common.golden_cases import assert_same_bits, encoded

DOT = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0, "0000": "denormal"}  # bits of the exponent, by prefix


def decoded_by_hand(code: int) -> float:
    """S | dot | exponent | mantissa, as strings of bits."""
    if code == 0b0_0000_000:
        return 0.0
    if code == 0b1_0000_000:
        return math.nan
    if code in (0b0_11_0111_1, 0b1_11_0111_1):
        return math.inf if code < 128 else -math.inf
    bits = f"{code:08b}"
    sign, rest = (-1.0 if bits[0] == "1" else 1.0), bits[1:]
    prefix = next(prefix for prefix in DOT if rest.startswith(prefix))
    rest, width = rest[len(prefix) :], DOT[prefix]
    if width == "denormal":
        return sign * 2.0 ** (int(rest, 2) - 23)
    exponent_bits, mantissa_bits = rest[:width], rest[width:]
    exponent = 0
    if width:
        exponent = int("1" + exponent_bits[1:], 2) * (-1 if exponent_bits[0] == "1" else 1)
    return sign * 2.0**exponent * (1 + int(mantissa_bits, 2) / 2 ** len(mantissa_bits))


def mantissa_bits_at(exponent: int) -> int:
    """3 for |E| <= 3, 2 up to 7, 1 up to 15, and 0 for denormal numbers."""
    size = abs(exponent)
    return 3 if size <= 3 else 2 if size <= 7 else 1 if size <= 15 else 0


def rounded_by_hand(x: float) -> float:
    """Half away from zero, with as many bits as the binade of ``x`` has; in float64, where all of it is exact."""
    if math.isnan(x) or x == 0:
        return x
    size = abs(x)
    if size < 2.0**-23:
        return 0.0
    if size < 2.0**-22:
        return math.copysign(2.0**-22, x)
    if math.isinf(x) or size >= 1.25 * 2.0**15:
        return math.copysign(math.inf, x)
    exponent = math.frexp(size)[1] - 1
    step = 2.0 ** (exponent - mantissa_bits_at(exponent))
    return math.copysign(math.floor(size / step + 0.5) * step, x)


def test_every_code_means_what_the_paper_says():
    expected = np.array([decoded_by_hand(code) for code in range(256)])
    np.testing.assert_array_equal(np.array(HIF8.values()), expected)


def test_the_range_and_the_number_of_binades_of_the_abstract():
    values = [v for v in HIF8.values() if math.isfinite(v) and v > 0]
    assert (min(values), max(values), len(values)) == (2.0**-22, 2.0**15, 126)
    exponents = [math.frexp(v)[1] - 1 for v in values]
    count = {e: exponents.count(e) for e in exponents}
    assert [sum(n == 2**m for n in count.values()) for m in (3, 2)] == [7, 8]
    assert sum(n == 2 for n in count.values()) == 15 and count[15] == 1  # the 16th has lost a code to infinity
    assert sorted(e for e in count if e < -15) == list(range(-22, -15)) and len(count) == 38
    assert [code for code in range(256) if HIF8.value(code) == 0] == [0]
    assert [code for code in range(256) if math.isnan(HIF8.value(code))] == [0x80]


def test_casts_of_all_kinds_of_numbers():
    """Random bits, all numbers, all ties and their neighbours."""
    values = np.array(sorted(v for v in HIF8.values() if math.isfinite(v) and v >= 0), dtype=np.float32)
    ties = np.append((values[1:] + values[:-1]) / 2, np.float32(1.25 * 2.0**15))
    around = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    random = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    near = np.exp2(np.random.default_rng(1).uniform(-24, 17, 20000)).astype(np.float32)
    x = np.concatenate([values, around, near, [0.0, np.inf, np.nan, 3.4e38, 1e-45]]).astype(np.float32)
    x = np.concatenate([x, -x, random])
    codes = round_to_nearest(torch.tensor(x), HIF8).numpy()
    decoded = np.array([decoded_by_hand(code) for code in codes])
    expected = np.array([rounded_by_hand(float(v)) for v in x])
    np.testing.assert_array_equal(decoded, expected)
    assert (codes[x == 0] == 0).all() and (codes[np.isnan(x)] == 0x80).all()


def test_every_code_is_the_cast_of_its_value():
    codes = torch.arange(256)
    assert torch.equal(round_to_nearest(element_values(codes, HIF8), HIF8), codes.to(torch.uint8))


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
@pytest.mark.parametrize("shape", [(5, 7), (32, 48), (1, 1)])
def test_tensors_have_a_scale_that_takes_the_largest_number_to_15(shape, direction):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 100
    plane = encoded(x, Encoding(HIFLOAT8), direction)
    factor = np.float32(15) / np.abs(x.numpy()).max()
    assert_same_bits(plane.scale, np.array([np.float32(1) / factor]))
    operand = x.numpy() if direction is ROWWISE else x.numpy().T
    expected = np.vectorize(rounded_by_hand)((operand * factor).astype(np.float64)).astype(np.float32)
    got = np.array([decoded_by_hand(code) for code in plane.operand_codes().reshape(-1).tolist()])
    np.testing.assert_array_equal(got.astype(np.float32).reshape(operand.shape), expected)
    assert_same_bits(kernels.decode_operand(plane), expected * (np.float32(1) / factor))


def test_a_tensor_with_infinity_is_not_scaled_and_keeps_it():
    x = torch.tensor([[torch.inf, 1.0, torch.nan, -2.5, -torch.inf]])
    q = cg.quantize(x, "hifloat8")
    assert q.plane(ROWWISE).scale.item() == 1.0
    for direction in cg.Direction:
        torch.testing.assert_close(q.dequantize(direction=direction), x, rtol=0, atol=0, equal_nan=True)


def test_the_scale_aims_where_the_numbers_are_dense():
    """Around 2**15, where the largest number would go otherwise, there is one bit of mantissa instead of three."""
    from dataclasses import replace

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    errors = [
        float((cg.quantize(x, fmt).dequantize() - x).norm() / x.norm())
        for fmt in (HIFLOAT8, replace(HIFLOAT8, name="to_the_top", amax_to=None))
    ]
    assert errors[0] < 0.03 < 0.1 < errors[1]


@pytest.mark.parametrize("options", [{"amax_to": 0.0}, {"amax_to": 1e6}])
def test_where_the_largest_number_goes_has_to_be_a_number_of_the_element(options):
    with pytest.raises(ValueError, match="format 'bad': amax_to needs .* above 0 and at most 32768"):
        cg.Format("bad", HIF8, ragged=True, **options)
    with pytest.raises(ValueError, match="amax_to needs scale_rule='fp32'"):
        cg.Format("bad", HIF8, (1, 32), "e8m0_up", amax_to=1.0)
