"""Floating-point arithmetic: every bit, with subnormals, signed zeros, infinities and NaNs."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from . import PtxError
from .handwritten import evaluate, floats
from .values import Array

_NAN = 0x7FFFFFFF
_SPECIAL = floats(0.0, -0.0, np.inf, -np.inf, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, 1.5, 3.0)
_NANS = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)


def _all_pairs(of: Array) -> tuple[Array, Array]:
    return np.repeat(of, of.size), np.tile(of, of.size)


def _random(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


@pytest.mark.parametrize(
    "verb, meaning", [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide)]
)
def test_ieee_arithmetic_makes_canonical_nans(verb: str, meaning: np.ufunc) -> None:
    a, b = _all_pairs(np.concatenate([_SPECIAL, _NANS, _random(30, 0)]))
    with np.errstate(all="ignore"):
        want = meaning(a.view(np.float32), b.view(np.float32))
        want64 = meaning(a.view(np.float32).astype(np.float64), b.view(np.float32).astype(np.float64))
        wide = [each.view(np.float32).astype(np.float64).view(np.uint64) for each in (a, b)]
    raw = np.where(np.isnan(want), np.uint32(_NAN), want.view(np.uint32))
    assert np.array_equal(evaluate(f"{verb}.rn.f32 d, a, b", a, b, result=np.uint32), raw)
    got = evaluate(f"{verb}.rn.f64 d, a, b", *wide, result=np.uint64).view(np.float64)
    assert np.array_equal(got, want64, equal_nan=True)


def test_known_bits() -> None:
    a, b = floats(1e-45, 1.0, 16777216.0, 0.1), floats(0.5, 3.0, 1.0, 0.2)
    assert evaluate("mul.rn.f32 d, a, b", a, b, result=np.uint32)[0] == 0  # half of the smallest: to even
    assert evaluate("div.rn.f32 d, a, b", a, b, result=np.uint32)[1] == 0x3EAAAAAB
    assert evaluate("add.rn.f32 d, a, b", a, b, result=np.uint32)[2] == 0x4B800000
    assert evaluate("sqrt.rn.f32 d, a", floats(2.0, -1.0, -0.0), result=np.uint32).tolist() == [
        0x3FB504F3,
        _NAN,
        1 << 31,
    ]
    got = evaluate("rcp.rn.f32 d, a", floats(3.0, 0.0, -0.0), result=np.uint32).tolist()
    assert got == [0x3EAAAAAB, 0x7F800000, 0xFF800000]


def test_pairs_of_f32_are_two_numbers() -> None:
    a, b = _all_pairs(np.concatenate([_SPECIAL, _NANS]))
    for verb in ("add", "sub", "mul"):
        both = evaluate(f"{verb}.rn.f32x2 d, a, b", a[:224].view(np.uint64), b[:224].view(np.uint64), result=np.uint64)
        one = evaluate(f"{verb}.rn.f32 d, a, b", a[:224], b[:224], result=np.uint32)
        assert np.array_equal(both.view(np.uint32), one)


def _nearest(value: Fraction, mantissa: int, smallest: int, largest_exponent: int) -> float:
    """The nearest number of a format, ties to even; written with fractions alone."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, smallest)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa)
    count = size / step
    low = int(count)
    rest = count - low
    low += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2)
    rounded = low * step
    if rounded >= Fraction(2) ** (largest_exponent + 1):
        return float(np.copysign(np.inf, float(np.sign(value.numerator))))
    return float(rounded if value > 0 else -rounded)


def test_a_fused_multiply_add_rounds_once() -> None:
    # A little beside the middle between two numbers: a sum in float64 loses the little, and then ties to even.
    traps = [
        (2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), 1 + 2.0**-23),
        (2.0**-12 * (1 + 2.0**-23), -(2.0**-12) * (1 - 2.0**-23), 1 + 2.0**-23),
        (2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), -1 - 2.0**-23),
        (1.0 + 2.0**-23, 1.0 + 2.0**-23, 2.0**-60),
        (16777217.0 - 1, 1.0, 1.0 + 2.0**-23),
        (1.0 + 2.0**-12, 1.0 - 2.0**-12, -(2.0**-80)),
        (2.0**-75, 2.0**-75, 1e-45),
        (-(2.0**-75), 2.0**-75, 3e-45),
    ]
    rng = np.random.default_rng(1)
    scale = np.exp2(rng.integers(-40, 40, (1500, 3)))
    cases = np.concatenate([np.array(traps), rng.standard_normal((1500, 3)) * scale]).astype(np.float32)
    cases[1000:, 2] = (-cases[1000:, 0] * cases[1000:, 1]) * (1 + np.float32(2.0**-20))  # cancellation
    a, b, c = (np.ascontiguousarray(cases[:, i]).view(np.uint32) for i in range(3))
    got = evaluate("fma.rn.f32 d, a, b, c", a, b, c, result=np.float32, allow_fma=True)
    want = [_nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), 23, -126, 127) for x, y, z in cases]
    assert got.tolist() == want
    assert (got != (cases[:, 0] * cases[:, 1] + cases[:, 2])).any()


def test_fused_multiply_adds_of_narrow_numbers_round_once() -> None:
    rng = np.random.default_rng(2)
    for dtype, name, mantissa, smallest, top in (
        (np.float16, "f16", 10, -14, 15),
        (ml_dtypes.bfloat16, "bf16", 7, -126, 127),
    ):
        raw = rng.integers(0, 1 << 16, (1500, 3), dtype=np.uint16)
        with np.errstate(all="ignore"):
            value = raw.view(dtype).astype(np.float64)
        finite = [bool(each.all()) for each in np.isfinite(value)]
        got = evaluate(
            f"fma.rn.{name} d, a, b, c", *(raw[:, i].copy() for i in range(3)), result=np.uint16, allow_fma=True
        )
        for (x, y, z), found, good in zip(value, got.view(dtype).astype(np.float64), finite, strict=True):
            if good:
                assert found == _nearest(Fraction(x) * Fraction(y) + Fraction(z), mantissa, smallest, top)


def test_a_fused_multiply_add_is_refused_unless_allowed() -> None:
    with pytest.raises(PtxError, match="fused.*allow_fma=True.*fma.rn.f32"):
        evaluate("fma.rn.f32 d, a, a, a", floats(1.0), result=np.uint32)


@pytest.mark.parametrize("name, nothing", [("f32", 1 << 31), ("bf16", 0x8000), ("bf16x2", 0x80008000)])
def test_a_fused_multiply_add_of_minus_zero_is_a_product(name: str, nothing: int) -> None:
    """+0 is another number: it makes a product of -0 positive. One half of a pair is enough to refuse it."""
    bits, dtype = (16, np.uint16) if name == "bf16" else (32, np.uint32)
    a, b = (np.random.default_rng(seed).integers(0, 1 << 16, 256).astype(dtype) for seed in range(2))
    if name != "bf16":
        a, b = a << dtype(16) | a, b << dtype(16) | b

    def found(setting: str) -> Array:
        """With an addend c that is set so."""
        return evaluate(f".reg .b{bits} c; {setting} fma.rn.{name} d, a, b, c", a, b, result=dtype)

    zero = f"mov.b{bits} c, {nothing:#x};"
    assert np.array_equal(found(zero), evaluate(f"mul.rn.{name} d, a, b", a, b, result=dtype))
    others = [f"mov.b{bits} c, {other:#x};" for other in (0, nothing | 1, nothing ^ 1 << (bits - 1))]
    twice, never, computed = f"{zero} mov.b{bits} c, 0;", f"@%p1 {zero}", f"or.b{bits} c, a, {nothing:#x};"
    for setting in (*others, twice, never, computed):
        with pytest.raises(PtxError, match="allow_fma=True"):
            found(setting)


@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_narrow_arithmetic_on_every_pattern(name: str, dtype: type) -> None:
    a = np.arange(1 << 16, dtype=np.uint16)
    b = np.random.default_rng(0).permutation(a)
    for verb, meaning in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        with np.errstate(all="ignore"):
            want = meaning(a.view(dtype), b.view(dtype))
        raw = np.where(np.isnan(want.astype(np.float32)), np.uint16(0x7FFF), want.view(np.uint16))
        assert np.array_equal(evaluate(f"{verb}.rn.{name} d, a, b", a, b, result=np.uint16), raw)
        pair = evaluate(f"{verb}.rn.{name}x2 d, a, b", a.view(np.uint32), b.view(np.uint32), result=np.uint32)
        assert np.array_equal(pair.view(np.uint16), raw)
    assert np.array_equal(evaluate(f"abs.{name} d, a", a, result=np.uint16), a & 0x7FFF)
    assert np.array_equal(evaluate(f"neg.{name} d, a", a, result=np.uint16), a ^ 0x8000)
    assert np.array_equal(
        evaluate(f"neg.{name}x2 d, a", a.view(np.uint32), result=np.uint32).view(np.uint16), a ^ 0x8000
    )


@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_narrow_and_wide_numbers_are_added_with_one_rounding(name: str, dtype: type) -> None:
    a = np.arange(1 << 16, dtype=np.uint16)
    b = _random(1 << 16, 3)
    with np.errstate(all="ignore"):
        for verb, ufunc in {"add": np.add, "sub": np.subtract}.items():
            want = ufunc(a.view(dtype).astype(np.float32), b.view(np.float32))
            raw = np.where(np.isnan(want), np.uint32(_NAN), want.view(np.uint32))
            assert np.array_equal(evaluate(f"{verb}.rn.f32.{name} d, a, b", a, b, result=np.uint32), raw)


def test_extremes_put_minus_zero_below_zero_and_skip_nans() -> None:
    a, b = floats(0.0, -0.0, 1.0, np.nan, np.nan, -5.0), floats(-0.0, 0.0, np.nan, 2.0, np.nan, -7.0)
    zero, minus = 0, 1 << 31
    got = evaluate("max.f32 d, a, b", a, b, result=np.uint32).tolist()
    assert got == [zero, zero, *floats(1.0, 2.0).tolist(), _NAN, *floats(-5.0).tolist()]
    got = evaluate("min.f32 d, a, b", a, b, result=np.uint32).tolist()
    assert got == [minus, minus, *floats(1.0, 2.0).tolist(), _NAN, *floats(-7.0).tolist()]
    got = evaluate("max.NaN.f32 d, a, b", a, b, result=np.uint32).tolist()
    assert got == [zero, zero, _NAN, _NAN, _NAN, *floats(-5.0).tolist()]
    got = evaluate("max.f32 d, a, b, c", a, b, floats(3.0, -1.0, 0.0, 0.0, 8.0, -6.0), result=np.float32).tolist()
    assert got == [3.0, 0.0, 1.0, 2.0, 8.0, -5.0]


@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_narrow_extremes_on_every_pattern(name: str, dtype: type) -> None:
    a = np.arange(1 << 16, dtype=np.uint16)
    b = np.random.default_rng(5).permutation(a)
    x, y = a.view(dtype).astype(np.float32), b.view(dtype).astype(np.float32)
    got = evaluate(f"max.{name} d, a, b", a, b, result=np.uint16)
    expected = np.fmax(x, y)
    assert np.array_equal(got.view(dtype).astype(np.float32), expected, equal_nan=True)
    assert set(got[np.isnan(expected)]) <= {0x7FFF}
    pair = evaluate(f"max.{name}x2 d, a, b", a.view(np.uint32), b.view(np.uint32), result=np.uint32)
    assert np.array_equal(pair.view(np.uint16), got)


def test_the_sign_of_the_first_is_copied() -> None:
    got = evaluate("copysign.f32 d, a, b", floats(-1.0, 2.0), floats(3.0, -4.0), result=np.float32)
    assert got.tolist() == [-3.0, 4.0]


@pytest.mark.parametrize(
    "instruction, reason",
    [
        ("div.full.f32 d, a, a", "leaves open"),
        ("div.approx.f32 d, a, a", "leaves open"),
        ("add.rn.ftz.f32 d, a, a", "leaves open"),
        ("ex2.approx.f32 d, a", "leaves open"),
        ("tanh.approx.f32 d, a", "leaves open"),
        ("rsqrt.approx.f32 d, a", "leaves open"),
        ("add.f32 d, a, a", "may fuse"),
        ("mul.f32 d, a, a", "may fuse"),
        ("add.rz.f32 d, a, a", "is not known"),
        ("add.rn.sat.f32 d, a, a", "is not known"),
        ("max.xorsign.abs.f32 d, a, a", "is not known"),
        ("mul.rn.f32 d, a", "1 operands instead of 2"),
    ],
)
def test_what_is_open_or_unknown_is_refused_by_name(instruction: str, reason: str) -> None:
    with pytest.raises(PtxError, match=f"{reason}.*{instruction}"):
        evaluate(instruction, floats(1.0), result=np.uint32)
