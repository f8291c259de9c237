"""Integer and logic instructions against Python's own integers."""

import numpy as np
import pytest

from . import PtxError
from .handwritten import evaluate, execute
from .values import Array, of_type, unsigned

_EDGES = [
    0,
    1,
    2,
    3,
    5,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0x123456789ABCDEF0,
]


def _numbers(bits: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed).integers(0, 1 << 63, 200, dtype=np.uint64) * np.uint64(3)
    edges = np.array(_EDGES + [(1 << 64) - 1 - each for each in _EDGES], np.uint64)
    return np.concatenate([edges, random]).astype(unsigned(bits))


def _pairs(bits: int) -> tuple[Array, Array]:
    a = _numbers(bits)
    return np.repeat(a[:60], 60), np.tile(_numbers(bits, 1)[:60], 60)


def _value(raw: int, kind: str) -> int:
    bits = int(kind[1:])
    return raw - (1 << bits) if kind[0] == "s" and raw >> (bits - 1) else raw


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)


_MEANING = {
    "add": lambda x, y, bits: x + y,
    "sub": lambda x, y, bits: x - y,
    "min": lambda x, y, bits: min(x, y),
    "max": lambda x, y, bits: max(x, y),
    "mul.lo": lambda x, y, bits: x * y,
    "mul.hi": lambda x, y, bits: x * y >> bits,
    "div": lambda x, y, bits: _truncated(x, y),
    "rem": lambda x, y, bits: x - y * _truncated(x, y),
}


@pytest.mark.parametrize(
    "verb, kind",
    [
        (verb, f"{kind}{bits}")
        for verb in _MEANING
        for kind in "su"
        for bits in (16, 32, 64)
        if (verb, bits) != ("mul.hi", 16)  # not known to the emulator
    ],
)
def test_arithmetic_of_two(verb: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = _pairs(bits)
    if verb in ("div", "rem"):
        b = np.where(b == 0, 1, b).astype(b.dtype)
    got = evaluate(f"{verb}.{kind} d, a, b", a, b, result=unsigned(bits))
    want = [
        _MEANING[verb](_value(x, kind), _value(y, kind), bits) % (1 << bits)
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b = _pairs(bits)
    c = np.resize(_numbers(2 * bits, 3), a.size)
    product = [_value(x, kind) * _value(y, kind) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    got = evaluate(f"mul.wide.{kind} d, a, b", a, b, result=unsigned(2 * bits))
    assert got.tolist() == [each % (1 << 2 * bits) for each in product]
    got = evaluate(f"mad.wide.{kind} d, a, b, c", a, b, c, result=unsigned(2 * bits))
    assert got.tolist() == [(each + z) % (1 << 2 * bits) for each, z in zip(product, c.tolist(), strict=True)]
    c = np.resize(_numbers(bits, 3), a.size)
    got = evaluate(f"mad.lo.{kind} d, a, b, c", a, b, c, result=unsigned(bits))
    assert got.tolist() == [(each + z) % (1 << bits) for each, z in zip(product, c.tolist(), strict=True)]


def test_division_by_zero_is_refused() -> None:
    with pytest.raises(PtxError, match="division of integers by zero.*div.s32"):
        evaluate("div.s32 d, a, b", np.ones(1, np.uint32), np.zeros(1, np.uint32), result=np.uint32)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_beyond_the_width_give_zeros_or_the_sign(bits: int) -> None:
    a, _ = _pairs(bits)
    by = np.resize(np.array([0, 1, 7, 8, bits - 1, bits, bits + 1, 255, 0xFFFFFFFF], np.uint32), a.size)
    top = (1 << bits) - 1
    pairs = list(zip(a.tolist(), by.tolist(), strict=True))
    assert evaluate(f"shl.b{bits} d, a, b", a, by, result=unsigned(bits)).tolist() == [
        (x << n) & top if n < bits else 0 for x, n in pairs
    ]
    for name in (f"u{bits}", f"b{bits}", f"s{bits}"):
        got = evaluate(f"shr.{name} d, a, b", a, by, result=unsigned(bits)).tolist()
        assert got == [(_value(x, name) >> min(n, bits)) & top for x, n in pairs], name


def test_funnel_shifts() -> None:
    a, b = _pairs(32)
    by = np.resize(np.array([0, 1, 8, 31, 32, 33, 63, 64], np.uint32), a.size)
    for left in (True, False):
        for mode in ("clamp", "wrap"):
            got = evaluate(f"shf.{'l' if left else 'r'}.{mode}.b32 d, a, b, c", a, b, by, result=np.uint32).tolist()
            for x, y, n, found in zip(a.tolist(), b.tolist(), by.tolist(), got, strict=True):
                n = min(n, 32) if mode == "clamp" else n % 32
                both = y << 32 | x
                assert found == ((both << n) >> 32 if left else both >> n) & 0xFFFFFFFF


@pytest.mark.parametrize("bits", [32, 64])
def test_fields(bits: int) -> None:
    a, b = _pairs(bits)
    position = np.resize(np.array([0, 1, 7, 16, 31, 32, 40, 63, 64, 255, 256 + 3], np.uint32), a.size)
    length = np.resize(np.array([0, 1, 4, 8, 31, 32, 33, 64, 255, 256 + 5, 12, 2, 3], np.uint32), a.size)
    top = (1 << bits) - 1
    for kind in "us":
        got = evaluate(f"bfe.{kind}{bits} d, a, b, c", a, position, length, result=unsigned(bits)).tolist()
        for x, p, n, found in zip(a.tolist(), position.tolist(), length.tolist(), got, strict=True):
            p, n = p & 255, n & 255
            sign = 0 if kind == "u" or n == 0 else x >> min(p + n - 1, bits - 1) & 1
            want = sum((x >> (p + i) & 1 if i < n and p + i < bits else sign) << i for i in range(bits))
            assert found == want, (hex(x), p, n)
    got = evaluate(f"bfi.b{bits} d, a, b, c, e", a, b, position, length, result=unsigned(bits)).tolist()
    for x, y, p, n, found in zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), got, strict=True):
        mask = (((1 << (n & 255)) - 1) << (p & 255)) & top
        assert found == (y & ~mask) | (x << (p & 255) & mask)


def test_bits_of_words() -> None:
    for bits in (32, 64):
        a = _numbers(bits)
        for name, meaning in {
            "popc": lambda x, bits: x.bit_count(),
            "clz": lambda x, bits: bits - x.bit_length(),
        }.items():
            got = evaluate(f"{name}.b{bits} d, a", a, result=np.uint32).tolist()
            assert got == [meaning(x, bits) for x in a.tolist()]
        got = evaluate(f"brev.b{bits} d, a", a, result=unsigned(bits)).tolist()
        assert got == [int(f"{x:0{bits}b}"[::-1], 2) for x in a.tolist()]


def test_every_function_of_three_bits() -> None:
    out = np.zeros(256, np.uint32)
    each = "lop3.b32 %r4, %r1, %r2, %r3, {0}; and.b32 %r5, %r4, 255; st.global.b32 [%rd5 + 4 * {0}], %r5;"
    lines = ["mov.b32 %r1, 0xF0; mov.b32 %r2, 0xCC; mov.b32 %r3, 0xAA; ld.param.b64 %rd5, [k_param_0];"]
    lines += [each.format(table).replace(f"4 * {table}", str(4 * table)) for table in range(256)]
    execute("".join(lines), out)
    assert out.tolist() == list(range(256))


def test_bytes_are_permuted_and_signs_replicated() -> None:
    rng = np.random.default_rng(0)
    a, b, selector = (rng.integers(0, 1 << 32, 2000, dtype=np.uint32) for _ in range(3))
    got = evaluate("prmt.b32 d, a, b, c", a, b, selector, result=np.uint32).tolist()
    for x, y, s, found in zip(a.tolist(), b.tolist(), selector.tolist(), got, strict=True):
        source = (y << 32 | x).to_bytes(8, "little")
        nibbles = [s >> 4 * i & 15 for i in range(4)]
        want = bytes((0xFF if source[n & 7] & 0x80 else 0) if n & 8 else source[n] for n in nibbles)
        assert found == int.from_bytes(want, "little")


def test_logic_and_signs() -> None:
    for bits in (16, 32, 64):
        a, b = _pairs(bits)
        for verb, meaning in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
            assert np.array_equal(evaluate(f"{verb}.b{bits} d, a, b", a, b, result=unsigned(bits)), meaning(a, b))
        assert np.array_equal(evaluate(f"not.b{bits} d, a", a, result=unsigned(bits)), ~a)
        kind = of_type(f"s{bits}")
        assert np.array_equal(evaluate(f"neg.s{bits} d, a", a, result=unsigned(bits)).view(kind), -a.view(kind))
        assert np.array_equal(evaluate(f"abs.s{bits} d, a", a, result=unsigned(bits)).view(kind), np.abs(a.view(kind)))


@pytest.mark.parametrize("kind", ["s", "u"])
def test_pairs_of_16_bits_do_not_carry_into_each_other(kind: str) -> None:
    a, b = _pairs(32)
    for verb, ufunc in {"add": np.add, "min": np.minimum, "max": np.maximum}.items():
        got = evaluate(f"{verb}.{kind}16x2 d, a, b", a, b, result=np.uint32)
        halves = of_type(f"{kind}16")
        assert np.array_equal(got.view(halves), ufunc(a.view(halves), b.view(halves)))
