"""Sixteen rows at a time: what columnwise blocks of 16 need, on tuples of 16 vectors.

Lane c of vector r is the number in row r of column c: a block is one lane across the tuple, and all
columns of the vector are worked on side by side, in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import Vector, _as_vector, _constant, load_at, load_bf16_at, pointer, prefetch_line, round_to_bf16

ROWS = 16
_I32 = ir.IntType(32)


def _sixteen(vector: Vector) -> Any:
    return types.UniTuple(vector, ROWS)


@intrinsic(prefer_literal=True)
def load_rows(typing_context, address, stride, lanes, dtype):
    """16 vectors of f32, read as ``dtype``, ``stride`` bytes apart."""
    vector = Vector("f32", lanes.literal_value)

    def generate(context, builder, signature, args):
        addresses = _addresses(builder, args[0], args[1])
        read = load_bf16_at if dtype.tag == "bf16" else load_at
        return context.make_tuple(builder, signature.return_type, [read(builder, at, vector) for at in addresses])

    return _sixteen(vector)(types.intp, types.intp, lanes, dtype), generate


@intrinsic
def store_rows(typing_context, address, stride, rows):
    """16 vectors, ``stride`` bytes apart."""

    def generate(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[2], ROWS)
        for at, value in zip(_addresses(builder, args[0], args[1]), values, strict=True):
            builder.store(value, pointer(builder, at, value.type)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, rows), generate


def _addresses(builder: Any, first: Any, stride: Any) -> list[Any]:
    return [builder.add(first, builder.mul(stride, ir.Constant(stride.type, row))) for row in range(ROWS)]


@intrinsic
def transpose_rows(typing_context, rows):
    """16 vectors of 16 lanes, rows and columns exchanged: squares of 1, 2, 4 and 8 lanes at a time."""

    def generate(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[0], ROWS)
        for side in (1, 2, 4, 8):
            # Lanes of the first vector are counted from 0, of the second from 16.
            first = [lane if not lane & side else 16 + lane - side for lane in range(ROWS)]
            second = [lane + side if not lane & side else 16 + lane for lane in range(ROWS)]
            for low in (row for row in range(ROWS) if not row & side):
                a, b = values[low], values[low + side]
                values[low], values[low + side] = (
                    builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), ROWS), order))
                    for order in (first, second)
                )
        return context.make_tuple(builder, signature.return_type, values)

    return rows(rows), generate


@intrinsic(prefer_literal=True)
def rotate_rows(typing_context, rows, sign_mask):
    """The 16-point Hadamard rotation down the rows, rounded to bf16.

    Signs, then sums and differences at distances 1, 2, 4, 8, then a quarter: in this order everywhere.
    """
    vector = rows.dtype
    mask = sign_mask.literal_value

    def generate(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[0], ROWS)
        minus_one, quarter = _constant(vector, -1.0), _constant(vector, 0.25)
        values = [builder.fmul(v, minus_one) if mask >> row & 1 else v for row, v in enumerate(values)]
        values = _butterfly(builder, values)
        words = [round_to_bf16(builder, builder.fmul(v, quarter), vector) for v in values]
        values = [builder.bitcast(word, vector.llvm) for word in words]
        return context.make_tuple(builder, signature.return_type, values)

    return rows(rows, sign_mask), generate


@intrinsic(prefer_literal=True)
def unrotate_rows(typing_context, rows, sign_mask):
    """The inverse of the rotation: sums and differences at distances 1, 2, 4, 8, then a quarter, then the signs."""
    vector = rows.dtype
    mask = sign_mask.literal_value

    def generate(context, builder, signature, args):
        values = _butterfly(builder, cgutils.unpack_tuple(builder, args[0], ROWS))
        quarters = [_constant(vector, -0.25 if mask >> row & 1 else 0.25) for row in range(ROWS)]
        values = [builder.fmul(value, quarter) for value, quarter in zip(values, quarters, strict=True)]
        return context.make_tuple(builder, signature.return_type, values)

    return rows(rows, sign_mask), generate


def _butterfly(builder: Any, values: list[Any]) -> list[Any]:
    values = list(values)
    for distance in (1, 2, 4, 8):
        for low in (row for row in range(ROWS) if not row & distance):
            a, b = values[low], values[low + distance]
            values[low], values[low + distance] = builder.fadd(a, b), builder.fsub(a, b)
    return values


@intrinsic
def amax_of_rows(typing_context, rows):
    """Bits of the largest magnitude in each column (i32 lanes); above those of Inf where there is a NaN."""
    bits = Vector("i32", rows.dtype.lanes)

    def generate(context, builder, signature, args):
        magnitude_mask = _constant(bits, 0x7FFFFFFF)
        best = None
        for value in cgutils.unpack_tuple(builder, args[0], ROWS):
            magnitude = builder.and_(builder.bitcast(value, bits.llvm), magnitude_mask)
            best = (
                magnitude
                if best is None
                else builder.select(builder.icmp_signed(">", best, magnitude), best, magnitude)
            )
        return best

    return bits(rows), generate


@intrinsic
def scale_rows(typing_context, rows, factor):
    """Every row times a vector (or number)."""

    def generate(context, builder, signature, args):
        by = _as_vector(context, builder, args[1], factor, rows.dtype)
        values = [builder.fmul(value, by) for value in cgutils.unpack_tuple(builder, args[0], ROWS)]
        return context.make_tuple(builder, signature.return_type, values)

    return rows(rows, factor), generate


@intrinsic
def store_columns(typing_context, address, stride, low, high):
    """Lane c of two i32 vectors, as 8 bytes, to ``address + c * stride``."""
    lanes = low.lanes
    pairs = ir.VectorType(ir.IntType(64), lanes)

    def generate(context, builder, signature, args):
        order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * lanes), [i for c in range(lanes) for i in (c, lanes + c)])
        words = builder.bitcast(builder.shuffle_vector(args[2], args[3], order), pairs)
        for column in range(lanes):
            offset = builder.mul(args[1], ir.Constant(args[1].type, column))
            word = builder.extract_element(words, ir.Constant(ir.IntType(32), column))
            builder.store(word, pointer(builder, builder.add(args[0], offset), word.type)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, low, high), generate


@intrinsic
def turn_bytes(typing_context, address, stride, out, out_stride):
    """Exchange rows and columns of bytes: 16 rows of 64 at ``address`` become 64 rows of 16 at ``out``.

    Rows r and r + 8 are interleaved byte by byte, in each quarter of the vectors, as one instruction does it. After
    four times, quarter q of vector c holds column 16 q + c.
    """
    bytes_ = Vector("u8", 64)
    quarters = range(0, 64, 16)

    def generate(context, builder, signature, args):
        address, stride, out, out_stride = args
        values = [load_at(builder, at, bytes_) for at in _addresses(builder, address, stride)]
        for _ in range(4):
            values = [
                builder.shuffle_vector(values[row], values[row + 8], ir.Constant(ir.VectorType(_I32, 64), order))
                for row in range(8)
                for order in (interleaved(0), interleaved(8))
            ]
        for column, value in enumerate(values):
            for first in quarters:
                lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(first, first + 16)))
                quarter = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)
                at = builder.add(out, builder.mul(out_stride, ir.Constant(out_stride.type, first + column)))
                builder.store(quarter, pointer(builder, at, quarter.type)).align = 1
        return context.get_dummy_value()

    def interleaved(start: int) -> list[int]:
        """Eight bytes of each quarter of two vectors; lanes of the second are counted from 64."""
        return [lane for first in quarters for i in range(start, start + 8) for lane in (first + i, 64 + first + i)]

    return types.void(*[types.intp] * 4), generate


@intrinsic
def amax_of_eight(typing_context, a, b, c, d, e, f, g, h):
    """Bits of the largest magnitude in each of eight vectors of 16 f32: eight i32 lanes, NaNs on top.

    Eight reductions side by side are half the work of one after the other.
    """
    bits, halves = Vector("i32", 16), Vector("i32", 8)

    def generate(context, builder, signature, args):
        def picked(x: Any, y: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))

        def folded(x: Any, y: Any, low: list[int], high: list[int]) -> Any:
            one, other = picked(x, y, low), picked(x, y, high)
            return builder.select(builder.icmp_signed(">", one, other), one, other)

        def lanes(*starts: int, count: int) -> list[int]:
            return [lane for start in starts for lane in range(start, start + count)]

        m = [builder.and_(builder.bitcast(value, bits.llvm), _constant(bits, 0x7FFFFFFF)) for value in args]
        # Halves, then quarters, then pairs of two vectors are folded side by side, each by one instruction.
        m = [folded(m[i], m[i + 4], lanes(0, 16, count=8), lanes(8, 24, count=8)) for i in range(4)]
        m = [folded(m[i], m[i + 1], lanes(0, 8, 16, 24, count=4), lanes(4, 12, 20, 28, count=4)) for i in (0, 2)]
        quads = range(0, 16, 4)
        pairs = folded(
            *m, lanes(*(q for quad in quads for q in (quad, quad + 16)), count=2),
            lanes(*(q + 2 for quad in quads for q in (quad, quad + 16)), count=2),
        )  # fmt: skip
        single = folded(pairs, pairs, list(range(16)), [lane ^ 1 for lane in range(16)])
        # Where the number of each vector is now: a, c | e, g | b, d | f, h.
        return picked(single, single, [0, 8, 2, 10, 4, 12, 6, 14])

    return halves(a, b, c, d, e, f, g, h), generate


@intrinsic
def prefetch_rows(typing_context, address, stride):
    """Ask for the cache lines at 16 addresses, which may be any."""

    def generate(context, builder, signature, args):
        for at in _addresses(builder, args[0], args[1]):
            prefetch_line(builder, at)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate
