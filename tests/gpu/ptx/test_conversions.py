"""cvt: integers, wide and small floats, against numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from . import PtxError
from .handwritten import evaluate, floats, patterns
from .values import Array, of_type, unsigned

_SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 0x1F),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 0x1F),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 0x7),
}


def _codes(raw: Array, name: str) -> Array:
    """What ml_dtypes makes of f32, saturated, with the NaN of PTX."""
    dtype, largest, nan = _SMALL[name]
    value = raw.view(np.float32)
    with np.errstate(all="ignore"):
        codes = np.clip(value, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(value), nan, codes).astype(np.uint16)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_bytes_of_small_floats(name: str) -> None:
    low = patterns()
    high = low[::-1].copy()
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32 d, b, a", low, high, result=np.uint16)
    assert np.array_equal(got, _codes(high, name) << 8 | _codes(low, name))


def test_four_bits() -> None:
    low = patterns()
    high = low[::-1].copy()
    got = evaluate("cvt.rn.satfinite.e2m1x2.f32 d, b, a", low, high, result=np.uint8)
    assert np.array_equal(got, _codes(high, "e2m1") << 4 | _codes(low, "e2m1"))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_bytes_of_pairs_of_f16(name: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f16x2 d, a", halves.view(np.uint32), result=np.uint16)
    with np.errstate(all="ignore"):
        want = _codes(halves.view(np.float16).astype(np.float32).view(np.uint32), name)
    assert np.array_equal(got, want[1::2] << 8 | want[::2])


@pytest.mark.parametrize("name", list(_SMALL))
def test_small_floats_are_exact_in_f16(name: str) -> None:
    dtype, _, _ = _SMALL[name]
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(name, 8)
    codes = np.arange(1 << bits, dtype=np.uint16)
    both = (codes[::-1] << (4 if bits == 4 else 8) | codes).astype(np.uint8 if bits == 4 else np.uint16)
    got = evaluate(f"cvt.rn.f16x2.{name}x2 d, a", both, result=np.uint32).view(np.float16)
    with np.errstate(all="ignore"):
        want = codes.astype(np.uint8).view(dtype).astype(np.float16)
    assert np.array_equal(got[::2], want, equal_nan=True) and np.array_equal(got[1::2], want[::-1], equal_nan=True)


def test_powers_of_two() -> None:
    raw = floats(1.0, 1.1, 0.0, 3e38, np.nan, 2.0**-127)
    up = evaluate("cvt.rp.satfinite.ue8m0x2.f32 d, b, a", raw, floats(3.0), result=np.uint16)
    assert [hex(each & 0xFF) for each in up] == ["0x7f", "0x80", "0x0", "0xfe", "0xff", "0x0"]
    assert set(up >> 8) == {0x81}
    down = evaluate(
        "cvt.rz.satfinite.ue8m0x2.f32 d, a, a", floats(1.0, 1.9, 1e-45, np.inf, 2.0**-126), result=np.uint16
    )
    assert [hex(each & 0xFF) for each in down] == ["0x7f", "0x7f", "0x0", "0xfe", "0x1"]
    codes = np.arange(256, dtype=np.uint16)
    back = evaluate("cvt.rn.bf16x2.ue8m0x2 d, a", codes, result=np.uint32).astype(np.uint16)
    want = codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(back.view(ml_dtypes.bfloat16).astype(np.float32), want, equal_nan=True)
    with pytest.raises(PtxError, match="negative.*ue8m0"):
        evaluate("cvt.rp.satfinite.ue8m0x2.f32 d, a, a", floats(-1.0), result=np.uint16)


def test_stochastic_rounding_to_four_bits() -> None:
    """The examples of the project's specification: (number, byte) -> result."""
    examples = [(0.3, 102, 0), (0.3, 103, 0.5), (5, 127, 4), (5, 128, 6), (-5, 128, -6), (1.9, 200, 2), (6, 255, 6)]
    for place in range(4):  # the other three are exact, so their bytes do not matter
        value = [np.ones(7, np.float32) for _ in range(4)]
        value[place] = np.array([each[0] for each in examples], np.float32)
        random = np.array([each[1] << 8 * place | 0x5A5A5A5A & ~(0xFF << 8 * place) for each in examples], np.uint32)
        got = evaluate("cvt.rs.satfinite.e2m1x4.f32 d, {e, c, b, a}, f", *value, random, result=np.uint16)
        codes = (got >> 4 * place & 15).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
        assert codes.astype(np.float32).tolist() == [each[2] for each in examples]
        others = [(got >> 4 * i & 15).tolist() for i in range(4) if i != place]
        assert others == [[2] * 7] * 3


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32"])
@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_integers_to_narrow_numbers(name: str, dtype: type, source: str) -> None:
    """Rounded once: through float64, where they are exact, and from there by numpy and ml_dtypes."""
    wide = np.random.default_rng(3).integers(0, 1 << 32, 2048, dtype=np.uint64).astype(np.uint32)
    numbers = np.concatenate([wide, np.arange(1 << 10, dtype=np.uint32), wide >> np.uint32(16)])
    raw = numbers.astype(unsigned(int(source[1:])))
    got = evaluate(f"cvt.rn.{name}.{source} d, a", raw, result=np.uint16)
    with np.errstate(all="ignore"):
        assert np.array_equal(got.view(dtype), raw.view(of_type(source)).astype(np.float64).astype(dtype))


@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_f32_to_16_bits(name: str, dtype: type) -> None:
    raw = patterns()
    value = raw.view(np.float32)
    with np.errstate(all="ignore"):
        nearest: Array = value.astype(dtype)
        back = nearest.astype(np.float32)
        towards = np.where(np.abs(back) > np.abs(value), nearest.view(np.uint16) - 1, nearest.view(np.uint16))
    nan = np.isnan(value)
    for mode, want in {"rn": nearest.view(np.uint16), "rz": towards}.items():
        want = np.where(nan, 0x7FFF, want).astype(np.uint16)
        assert np.array_equal(evaluate(f"cvt.{mode}.{name}.f32 d, a", raw, result=np.uint16), want), mode
        pair = evaluate(f"cvt.{mode}.{name}x2.f32 d, b, a", raw, raw[::-1].copy(), result=np.uint32)
        assert np.array_equal(pair, want[::-1].astype(np.uint32) << 16 | want), mode
    saturated = evaluate(f"cvt.rn.satfinite.{name}.f32 d, a", floats(np.inf, -3e38), result=np.uint16)
    assert saturated.tolist() == ([0x7BFF, 0xFBFF] if name == "f16" else [0x7F7F, 0xFF62])


@pytest.mark.parametrize("name, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bits_to_f32(name: str, dtype: type) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16)
    got = evaluate(f"cvt.f32.{name} d, a", raw, result=np.float32)
    with np.errstate(all="ignore"):
        assert np.array_equal(got, raw.view(dtype).astype(np.float32), equal_nan=True)


def test_f64() -> None:
    value = np.array([1.0, 0.1, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 1e300, -1e-46, np.nan, np.inf], np.float64)
    got = evaluate("cvt.rn.f32.f64 d, a", value.view(np.uint64), result=np.uint32)
    with np.errstate(all="ignore"):
        want = value.astype(np.float32).view(np.uint32)
    want[6] = 0x7FFFFFFF
    assert np.array_equal(got, want)
    assert evaluate("cvt.f64.f32 d, a", floats(0.1, -0.0), result=np.float64).tolist() == [np.float32(0.1), -0.0]


def test_integers_to_floats_round_to_nearest() -> None:
    raw = np.array([0, 1, 16777217, 16777219, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF7F], np.uint32)
    assert np.array_equal(evaluate("cvt.rn.f32.u32 d, a", raw, result=np.float32), raw.astype(np.float32))
    assert np.array_equal(
        evaluate("cvt.rn.f32.s32 d, a", raw, result=np.float32), raw.view(np.int32).astype(np.float32)
    )
    wide = np.array([2**53 + 1, 2**63 + 2**39, 2**63 + 2**39 + 1, 2**64 - 1], np.uint64)
    got = evaluate("cvt.rn.f32.u64 d, a", wide, result=np.float32).tolist()
    assert got == [2.0**53, 2.0**63, 2.0**63 + 2.0**40, 2.0**64]
    assert evaluate("cvt.rn.f64.u64 d, a", wide, result=np.float64)[0] == 2.0**53


@pytest.mark.parametrize(
    "to, want",
    [
        ("s32", [0, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31)]),
        ("u32", [0, 2, 0, 2**32 - 1, 0, 0, 2**32 - 1, 0]),
        ("s16", [0, 2, -2, 2**15 - 1, -(2**15), 0, 2**15 - 1, -(2**15)]),
        ("u8", [0, 2, 0, 255, 0, 0, 255, 0]),
        ("s64", [0, 2, -2, 2**63 - 1, -(2**63), -(2**63), 2**63 - 1, -(2**63)]),
        ("u64", [0, 2, 0, 2**64 - 1, 0, 2**63, 2**64 - 1, 0]),
    ],
)
def test_floats_to_integers_are_clamped(to: str, want: list[int]) -> None:
    raw = floats(0.5, 2.5, -2.5, 1e30, -1e30, np.nan, np.inf, -np.inf)
    bits = int(to[1:])
    got = evaluate(f"cvt.rzi.{to}.f32 d, a", raw, result=unsigned(bits))
    assert got.view(of_type(to)).tolist() == want


def test_rounding_modes_of_integers() -> None:
    raw = floats(0.5, 1.5, 2.5, -0.5, -1.5, 2.7, -2.7)
    want = {"rni": [0, 2, 2, 0, -2, 3, -3], "rmi": [0, 1, 2, -1, -2, 2, -3], "rpi": [1, 2, 3, 0, -1, 3, -2]}
    for mode, numbers in want.items():
        assert evaluate(f"cvt.{mode}.s32.f32 d, a", raw, result=np.int32).tolist() == numbers
        whole = evaluate(f"cvt.{mode}.f32.f32 d, a", raw, result=np.float32)
        assert whole.tolist() == numbers
    assert evaluate("cvt.rni.f32.f32 d, a", floats(-0.5), result=np.uint32)[0] == 1 << 31


def test_integers_are_resized_by_the_type_of_the_source() -> None:
    raw = np.array([0x7F, 0x80, 0xFF, 0x8000, 0xFFFF, 0x12345678], np.uint32)
    assert evaluate("cvt.s32.s8 d, a", raw, result=np.int32).tolist() == [127, -128, -1, 0, -1, 0x78]
    assert evaluate("cvt.u32.u8 d, a", raw, result=np.uint32).tolist() == [127, 128, 255, 0, 255, 0x78]
    assert evaluate("cvt.s64.s32 d, a", raw[:1] * 0 + np.uint32(0x80000000), result=np.int64).tolist() == [-(2**31)]
    assert evaluate("cvt.u64.u32 d, a", raw[:1] * 0 + np.uint32(0x80000000), result=np.int64).tolist() == [2**31]
    assert evaluate("cvt.u16.u32 d, a", raw, result=np.uint16).tolist() == [0x7F, 0x80, 0xFF, 0x8000, 0xFFFF, 0x5678]


def test_a_register_that_is_wider_than_the_type_is_filled_by_it() -> None:
    """A result of 8 bits in a register of 16: with its sign if the type has one, else with zeros."""
    raw = np.array([0x7F, 0x80, 0x1FF], np.uint32)
    assert evaluate("cvt.s8.s32 d, a", raw, result=np.int16).tolist() == [127, -128, -1]
    assert evaluate("cvt.u8.u32 d, a", raw, result=np.int16).tolist() == [127, 128, 255]
    assert evaluate("cvt.s8.u32 d, a", raw, result=np.int16).tolist() == [127, -128, -1]
    assert evaluate("cvt.rzi.s8.f32 d, a", floats(-3.5, 200.0), result=np.int16).tolist() == [-3, 127]


@pytest.mark.parametrize(
    "opcode",
    [
        "cvt.rn.satfinite.relu.e4m3x2.f32", "cvt.rn.relu.f16x2.f32", "cvt.rn.e4m3x2.f32", "cvt.rz.satfinite.e4m3x2.f32",
        "cvt.satfinite.e4m3x2.f32", "cvt.rna.tf32.f32", "cvt.rp.ue8m0x2.f32",
    ],
)  # fmt: skip
def test_other_roundings_and_saturations_are_refused(opcode: str) -> None:
    with pytest.raises(PtxError, match=f"{opcode} is not known"):
        evaluate(f"{opcode} d, a, a", floats(1.0), result=np.uint16)
