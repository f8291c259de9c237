"""The product of a few rows with a plane: rows of the plane are decoded in the first-level cache, and used up there.

Decoding the whole plane first would write and read four bytes for each code. A GEMM with many rows reads them often;
one with few rows spends its time on that alone.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .calling import caller
from .compiling import inner, kernel
from .jobs import SLOT, store_i64
from .simd import bits_of, load, splat, store_i32, sum_of_halves

RESULT = 64  # bytes of scratch memory before the decoded rows, for the result of the decoder

_call_runner = caller(tags=1)


@intrinsic
def _multiply_add(typing_context, left, right, addend):
    """left * right + addend, rounded once."""

    def generate(context, builder, signature, args):
        function = ir.FunctionType(left.llvm, [left.llvm] * 3)
        name = f"llvm.fma.v{left.lanes}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)

    return left(left, right, addend), generate


@inner
def _dot(left, right, count):
    """The sum of the products of two rows of fp32 numbers: of 128 sums, four at a time in each lane."""
    sums = splat(0.0, 32, "f32")
    others, thirds, fourths = sums, sums, sums
    at = 0
    while at + 128 <= count:
        a, b = left + at * 4, right + at * 4
        sums = _multiply_add(load(a, 32, "f32"), load(b, 32, "f32"), sums)
        others = _multiply_add(load(a + 128, 32, "f32"), load(b + 128, 32, "f32"), others)
        thirds = _multiply_add(load(a + 256, 32, "f32"), load(b + 256, 32, "f32"), thirds)
        fourths = _multiply_add(load(a + 384, 32, "f32"), load(b + 384, 32, "f32"), fourths)
        at += 128
    while at + 32 <= count:
        sums = _multiply_add(load(left + at * 4, 32, "f32"), load(right + at * 4, 32, "f32"), sums)
        at += 32
    total = sum_of_halves((sums + others) + (thirds + fourths))
    rest = splat(0.0, 1, "f32")
    while at < count:
        rest = _multiply_add(load(left + at * 4, 1, "f32"), load(right + at * 4, 1, "f32"), rest)
        at += 1
    return total + sum_of_halves(rest)


@kernel
def multiply(
    runner, decoder, table, first_at, out_at, unit, x, rows, out, out_step, first, last, width, at_once, scratch, tag
):
    """Write the products of all rows of ``x`` with the rows ``first:last`` of a plane.

    Args:
        runner: runs the decoder; see `jobs`.
        decoder: the kernel that decodes the plane.
        table: its arguments, a word each. They are changed.
        first_at: which word is the first step of the decoder; the last one follows.
        out_at: which word is the address of its result.
        unit: steps of the decoder in a row.
        x: fp32 rows, one after the other.
        rows: number of rows of ``x``.
        out: fp32 numbers: a row for each of ``x``.
        out_step: bytes from one row of ``out`` to the next.
        first: the first row of the plane.
        last: the row after the last.
        width: numbers in a row.
        at_once: how many rows are decoded at once.
        scratch: memory for that many rows, and RESULT bytes.
        tag: any tag.
    """
    decoded = scratch + RESULT
    begin = first
    while begin < last:
        end = min(begin + at_once, last)
        store_i64(table + first_at * SLOT, begin * unit)
        store_i64(table + first_at * SLOT + SLOT, end * unit)
        store_i64(table + out_at * SLOT, decoded - begin * width * 4)
        _call_runner(runner, (decoder, table, 1, 0, scratch))
        for row in range(begin, end):
            numbers = decoded + (row - begin) * width * 4
            for i in range(rows):
                store_i32(out + i * out_step + row * 4, bits_of(_dot(x + i * width * 4, numbers, width)))
        begin = end
    return np.int64(0)
