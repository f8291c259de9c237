"""The vector type by itself: every operation against numpy, on numbers at the edges."""

from functools import cache

import numpy as np
import pytest
import torch
from numba import njit

from crossgrain.kernels.cpu import tiles
from crossgrain.kernels.cpu.packing import pack_nibbles, pack_sixes, unpack_nibbles, unpack_sixes
from crossgrain.kernels.cpu.random_bits import hash_counters, lane_numbers
from crossgrain.kernels.cpu.simd import (
    alternating,
    as_bytes,
    as_float,
    as_int,
    as_words,
    bits_of,
    float_minimum,
    float_of,
    largest,
    load,
    load_bf16,
    load_f32,
    load_i32,
    load_u8,
    maximum,
    minimum,
    narrow,
    opaque,
    prefetch,
    side_by_side,
    splat,
    store,
    store_apart,
    store_i32,
    store_u8,
    stream,
    sum_of_halves,
    to_bf16,
    to_float,
    to_int,
    total_of,
    where_greater,
    where_less,
    widen,
)
from crossgrain.kernels.cpu.tags import BF16, F32
from crossgrain.kernels.reference.hadamard import rotate, unrotate
from crossgrain.kernels.reference.packing import pack, unpack
from crossgrain.kernels.reference.random_bits import hash_counter

EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 2.0**-127, 2.0**-126, 3.4028235e38, -3.4028235e38, np.inf, -np.inf,
     np.nan, 1 / 3, 65504.0, -6.5],
    dtype=np.float32,
)  # fmt: skip
INTS = np.array(
    [0, 1, -1, 2, 15, 255, 256, -256, 65535, 65536, 2**31 - 1, -(2**31), 1 - 2**31, 0x7F800000, 0x400000, 0x12345678],
    dtype=np.int32,
)
CODES_OF_4 = np.arange(16, dtype=np.int32) * 5 % 16


def run(function, *arguments, out):
    """``function`` of the addresses of arrays (and of plain numbers), writing to ``out``."""
    given = [array.ctypes.data if isinstance(array, np.ndarray) else array for array in arguments]
    _compiled(function)(*given, out.ctypes.data)
    return out


_compiled = cache(njit)


def assert_same(mine, theirs):
    """Equal bits, but one NaN is as good as another."""
    assert mine.dtype == theirs.dtype
    if mine.dtype == np.float32:
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        mine, theirs = (np.where(np.isnan(v), np.float32(0), v).view(np.int32) for v in (mine, theirs))
    np.testing.assert_array_equal(mine, theirs)


@njit
def f32(address):
    return load(address, 16, "f32")


@njit
def i32(address):
    return load(address, 16, "i32")


# ---- two operands ------------------------------------------------------------------------------------

FLOATS = {
    "add": (lambda a, b, out: store(out, f32(a) + f32(b)), np.add),
    "subtract": (lambda a, b, out: store(out, f32(a) - f32(b)), np.subtract),
    "multiply": (lambda a, b, out: store(out, f32(a) * f32(b)), np.multiply),
    "divide": (lambda a, b, out: store(out, f32(a) / f32(b)), np.divide),
    "float_minimum": (lambda a, b, out: store(out, float_minimum(f32(a), f32(b))), lambda a, b: np.where(a < b, a, b)),
    "where_less": (
        lambda a, b, out: store(out, where_less(f32(a), f32(b), f32(b), 7.0)),
        lambda a, b: np.where(a < b, b, np.float32(7)),
    ),
}
INTEGERS = {
    "add": (lambda a, b, out: store(out, i32(a) + i32(b)), np.add),
    "subtract": (lambda a, b, out: store(out, i32(a) - i32(b)), np.subtract),
    "multiply": (lambda a, b, out: store(out, i32(a) * i32(b)), np.multiply),
    "and": (lambda a, b, out: store(out, i32(a) & i32(b)), np.bitwise_and),
    "or": (lambda a, b, out: store(out, i32(a) | i32(b)), np.bitwise_or),
    "xor": (lambda a, b, out: store(out, i32(a) ^ i32(b)), np.bitwise_xor),
    "maximum": (lambda a, b, out: store(out, maximum(i32(a), i32(b))), np.maximum),
    "minimum": (lambda a, b, out: store(out, minimum(i32(a), i32(b))), np.minimum),
    "where_greater": (
        lambda a, b, out: store(out, where_greater(i32(a), i32(b), 5, i32(b))),
        lambda a, b: np.where(a > b, np.int32(5), b),
    ),
    "shift left": (lambda a, b, out: store(out, i32(a) << (i32(b) & 31)), lambda a, b: a << (b & 31)),
    "shift right, logical": (
        lambda a, b, out: store(out, i32(a) >> (i32(b) & 31)),
        lambda a, b: (a.view(np.uint32) >> (b & 31).view(np.uint32)).view(np.int32),
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name):
    mine, theirs = FLOATS[name]
    a, b = np.repeat(EDGES, 16), np.tile(EDGES, 16)  # every pair
    out = [run(mine, a[i : i + 16], b[i : i + 16], out=np.empty(16, np.float32)) for i in range(0, 256, 16)]
    with np.errstate(all="ignore"):
        assert_same(np.concatenate(out), theirs(a, b))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    mine, theirs = INTEGERS[name]
    a, b = np.repeat(INTS, 16), np.tile(INTS, 16)
    out = [run(mine, a[i : i + 16], b[i : i + 16], out=np.empty(16, np.int32)) for i in range(0, 256, 16)]
    assert_same(np.concatenate(out), theirs(a, b))


def test_a_number_stands_for_a_vector_of_it():
    def scalars(floats, integers, factor, shift, out):
        store(out, f32(floats) * factor + 0.5)
        store(out + 64, as_float((i32(integers) >> shift) & 0xFF000000))
        store(out + 128, splat(factor, 16, "f32"))
        store(out + 192, as_float(splat(0x80000000, 16, "i32")))

    out = run(scalars, EDGES, INTS, np.float32(3.0), 4, out=np.empty((4, 16), np.float32))
    with np.errstate(all="ignore"):
        assert_same(out[0], EDGES * np.float32(3) + np.float32(0.5))
    assert_same(out[1], ((INTS.view(np.uint32) >> 4) & 0xFF000000).view(np.float32))
    assert_same(out[2], np.full(16, 3, np.float32))
    assert_same(out[3], np.full(16, -0.0, np.float32))


# ---- one operand -------------------------------------------------------------------------------------


def bfloat16_of(values):
    return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def packed(codes, bits):
    return pack(torch.from_numpy(codes.astype(np.uint8)).view(1, -1), bits).numpy()[0]


def unpacked(bytes_, bits):
    return unpack(torch.from_numpy(bytes_).view(1, -1), bits).numpy()[0].astype(np.int32)


CODES_OF_6 = np.arange(64, dtype=np.int32) * 37 % 64
BYTES = (np.arange(256) * 89 % 256).astype(np.uint8)
HALVES = np.array([0, 0x8000, 0x3F80, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F] * 2, dtype=np.uint16)
NUMBERS = np.nan_to_num(EDGES, nan=5.0, posinf=np.inf, neginf=-np.inf)
TIES = (np.arange(16, dtype=np.int32) * 0x8000 + 0x3F7F7FFF).view(np.float32)  # about halfway between two bf16
FRACTIONS = np.array([0.0, -0.0, 0.9, -0.9, 1.5, -1.5, 2.0**30, -(2.0**30)] * 2, dtype=np.float32)

CONVERSIONS = {
    "as_int": (lambda a, out: store(out, as_int(f32(a))), EDGES, EDGES.view(np.int32)),
    "as_float": (lambda a, out: store(out, as_float(i32(a))), INTS, INTS.view(np.float32)),
    "to_int": (lambda a, out: store(out, to_int(f32(a))), FRACTIONS, FRACTIONS.astype(np.int32)),
    "to_float": (lambda a, out: store(out, to_float(i32(a))), INTS, INTS.astype(np.float32)),
    "narrow": (lambda a, out: store(out, narrow(i32(a))), INTS, INTS.astype(np.uint8)),
    "widen": (lambda a, out: store(out, widen(load(a, 256, "u8"))), BYTES, BYTES.astype(np.int32)),
    "as_bytes": (lambda a, out: store(out, as_bytes(i32(a))), INTS, INTS.view(np.uint8)),
    "as_words": (lambda a, out: store(out, as_words(load(a, 256, "u8"))), BYTES, BYTES.view(np.int32)),
    "store_apart": (lambda a, out: store_apart(out + 60, -4, i32(a)), INTS, INTS[::-1].copy()),
    "load_bf16": (
        lambda a, out: store(out, load_bf16(a, 16)), HALVES, (HALVES.astype(np.uint32) << 16).view(np.float32),
    ),
    "to_bf16": (lambda a, out: store(out, to_bf16(f32(a))), NUMBERS, bfloat16_of(NUMBERS)),
    "to_bf16, ties": (lambda a, out: store(out, to_bf16(f32(a))), TIES, bfloat16_of(TIES)),
    "pack_nibbles": (lambda a, out: store(out, pack_nibbles(i32(a))), CODES_OF_4, packed(CODES_OF_4, 4)),
    "unpack_nibbles": (lambda a, out: store(out, unpack_nibbles(load(a, 256, "u8"))), BYTES, unpacked(BYTES, 4)),
    "pack_sixes": (lambda a, out: store(out, pack_sixes(load(a, 64, "i32"))), CODES_OF_6, packed(CODES_OF_6, 6)),
    "unpack_sixes": (
        lambda a, out: store(out, unpack_sixes(load(a, 48, "u8"))), BYTES[:48], unpacked(BYTES[:48], 6),
    ),
    "hash": (
        lambda a, out: store(out, hash_counters(lane_numbers(16) + 7, 3, 5)),
        INTS,
        hash_counter(torch.arange(7, 23), 3, 5).numpy().astype(np.uint32).view(np.int32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(name):
    function, given, expected = CONVERSIONS[name]
    assert_same(run(function, given, out=np.empty_like(expected)), expected)


def test_nan_stays_nan_in_bfloat16():
    """Rounding up must not carry its payload away."""
    nans = np.array([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000] * 4, dtype=np.int64).astype(np.int32).view(np.float32)
    out = run(lambda a, out: store(out, to_bf16(f32(a))), nans, out=np.empty(16, np.uint16))
    assert ((out & 0x7FFF) > 0x7F80).all()


def test_one_number_of_a_vector():
    def reduce(floats, integers, out):
        store_i32(out, largest(i32(integers)))
        store(out + 4, splat(sum_of_halves(f32(floats)), 1, "f32"))
        store_i32(out + 8, bits_of(float_of(0x7F7FFFFF)))
        store_i32(out + 12, total_of(i32(integers)))

    floats = np.array([1e8, 1.0, -1e8, 3.0] * 4, dtype=np.float32)
    total = floats
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    out = run(reduce, floats, INTS, out=np.empty(4, np.int32))
    assert out.tolist() == [INTS.max(), total.view(np.int32)[0], 0x7F7FFFFF, INTS.sum(dtype=np.int32)]


# ---- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element, size", [("f32", 4), ("i32", 4), ("u16", 2), ("u8", 1)])
@pytest.mark.parametrize("lanes", [1, 8, 32])
def test_vectors_of_any_address(element, size, lanes):
    def copy(source, out):
        store(out + 1, load(source + 3, lanes, element))

    out = run(copy, BYTES, out=np.full(lanes * size + 2, 0xA5, np.uint8))
    assert out.tolist() == [0xA5, *BYTES[3 : 3 + lanes * size], 0xA5]


def test_numbers_of_any_address():
    def copy(source, out):
        store_u8(out, load_u8(source) + 256)  # only the low byte is written
        store_i32(out + 1, load_i32(source + 1))
        store(out + 5, splat(load_f32(source + 5), 1, "f32"))

    out = run(copy, BYTES, out=np.full(10, 0xA5, np.uint8))
    assert out.tolist() == [*BYTES[:9], 0xA5]


@pytest.mark.parametrize("lanes", [8, 32])
def test_writing_past_the_caches(lanes):
    def copy(source, out):
        stream(out, load(source, lanes, "f32"))

    memory = np.zeros(96, np.float32)
    out = memory[-memory.ctypes.data % 64 // 4 :][:lanes]
    assert out.ctypes.data % 64 == 0
    assert_same(run(copy, np.tile(EDGES, 2), out=out), np.tile(EDGES, 2)[:lanes])


# ---- sixteen rows ------------------------------------------------------------------------------------

SQUARE = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
load_rows, store_rows, transpose_rows = tiles.load_rows, tiles.store_rows, tiles.transpose_rows
amax_of_rows, amax_of_eight, scale_rows = tiles.amax_of_rows, tiles.amax_of_eight, tiles.scale_rows
rotate_rows, store_columns = tiles.rotate_rows, tiles.store_columns


def test_rows_are_turned():
    def turn(x, out):
        store_rows(out, 64, transpose_rows(load_rows(x, 64, 16, F32)))

    assert_same(run(turn, SQUARE, out=np.empty((16, 16), np.float32)), SQUARE.T.copy())


def test_rows_of_bfloat16():
    def copy(x, out):
        store_rows(out, 64, load_rows(x, 32, 16, BF16))

    halves = bfloat16_of(SQUARE)
    out = run(copy, halves, out=np.empty((16, 16), np.float32))
    assert_same(out, (halves.astype(np.uint32) << 16).view(np.float32))


def test_amaxes_and_scaling_of_rows():
    def amaxes(x, factors, out):
        rows = load_rows(x, 64, 16, F32)
        store(out, amax_of_rows(rows))
        store_rows(out + 64, 64, scale_rows(rows, f32(factors)))

    out = run(amaxes, SQUARE, EDGES, out=np.empty((17, 16), np.float32))
    assert_same(out[0], np.abs(SQUARE).max(axis=0))
    with np.errstate(all="ignore"):
        assert_same(out[1:], SQUARE * EDGES)


def test_eight_amaxes_at_once():
    def amaxes(x, out):
        a, b, c, d = f32(x), f32(x + 64), f32(x + 128), f32(x + 192)
        e, f, g, h = f32(x + 256), f32(x + 320), f32(x + 384), f32(x + 448)
        store(out, amax_of_eight(a, b, c, d, e, f, g, h))

    for column in range(16):  # the largest in every place
        rows = SQUARE[:8].copy()
        rows[:, column] = np.arange(-9, -1)
        assert_same(run(amaxes, rows, out=np.empty(8, np.float32)), np.arange(9, 1, -1, dtype=np.float32))


@pytest.mark.parametrize("mask", [0, 0xD7E8])
def test_rotation_of_rows(mask):
    def turn(x, out):
        store_rows(out, 64, rotate_rows(load_rows(x, 64, 16, F32), mask))

    theirs = rotate(torch.from_numpy(SQUARE.T.copy()), mask).to(torch.bfloat16).float().numpy().T.copy()
    assert_same(run(turn, SQUARE, out=np.empty((16, 16), np.float32)), theirs)


def test_columns_of_bytes():
    def scatter(low, high, out):
        store_columns(out, 16, i32(low), i32(high))

    out = run(scatter, INTS, INTS[::-1].copy(), out=np.zeros((16, 16), np.uint8))
    expected = np.concatenate(
        [INTS.view(np.uint8).reshape(16, 4), INTS[::-1].copy().view(np.uint8).reshape(16, 4)], axis=1
    )
    np.testing.assert_array_equal(out[:, :8], expected)
    assert not out[:, 8:].any()


def test_lanes_of_two_vectors():
    x = np.arange(32, dtype=np.int32)
    both = run(lambda a, b, out: store(out, side_by_side(i32(a), i32(b))), x[:16], x[16:], out=np.empty(32, np.int32))
    np.testing.assert_array_equal(both, x)
    turns = run(lambda a, b, out: store(out, alternating(i32(a), i32(b))), x[:16], x[16:], out=np.empty(32, np.int32))
    np.testing.assert_array_equal(turns, x.reshape(2, 16).T.ravel())


def test_reading_ahead_does_nothing_else():
    """Not even at an address that nobody has."""

    def work(x, out):
        prefetch(x)
        prefetch(64)
        tiles.prefetch_rows(x, 4096)
        tiles.prefetch_rows(0, 1 << 40)
        store_i32(out, opaque(7))

    assert run(work, INTS, out=np.zeros(1, np.int32)) == 7


@pytest.mark.parametrize("mask", [0, 0xD7E8, 0xFFFF])
def test_rotation_is_undone(mask):
    def work(x, out):
        store_rows(out, 64, tiles.unrotate_rows(load_rows(x, 64, 16, F32), mask))

    x = np.random.default_rng(3).standard_normal((16, 16), np.float32)
    expected = unrotate(torch.from_numpy(x).t().contiguous(), mask).t().contiguous()
    assert_same(run(work, x, out=np.empty((16, 16), np.float32)), expected.numpy())
