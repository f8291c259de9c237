"""Decoding planes that are stored transposed: an operand [K, M] -> the matrix [M, K].

Codes are turned before they are decoded, because they are smaller. A tile of 32 rows and 128 columns of the operand is
read as words, of which each has several codes of its row. The turned words have a row of the operand in each lane,
so what is decoded from them is a piece of a row of the matrix, which fills whole cache lines.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import inner, kernel, overloaded
from .decode import put
from .elements import E4M3_TAG, _element, decode_element, e8m0_value_vector
from .simd import Vector, load, load_at, pointer, store, widen
from .tags import BF16, F32, NO, YES
from .tiles import ROWS, load_rows, store_rows, transpose_rows, unrotate_rows

LANES = 32  # rows of the operand in a tile
HEIGHT = 128  # its columns: rows of the matrix
GROUPS = HEIGHT // ROWS
LINE = LANES * 4

# Scratch of a thread: a tile of codes at the edge, the turned words, 16 decoded vectors, a factor for each lane and
# group, amaxes, block scales, and a piece of a row at the edge.
PART = LANES * HEIGHT
WORDS = PART + LANES * HEIGHT
VALUES = WORDS + HEIGHT // 4 * LINE
FACTORS = VALUES + ROWS * LINE
AMAXES = FACTORS + GROUPS * LINE
BYTES = AMAXES + LINE
EDGE = BYTES + GROUPS * LANES
SCRATCH = EDGE + LINE


@inner
def _copy(source, target, count):
    for i in range(count):
        store(target + i, load(source + i, 1, "u8"))


def bits_of_code(element):
    """Bits of a code."""


@overloaded(bits_of_code)
def _bits_of_code(element):
    bits = _element(element).bits
    return lambda element: bits


@inner
def _turn(source, stride, target, words):
    """Words [LANES, words] -> [words, LANES]; at least 16."""
    for row in range(0, LANES, ROWS):
        for start in range(0, words, ROWS):
            word = min(start, words - ROWS)  # the last 16 may overlap those before
            square = load_rows(source + row * stride + word * 4, stride, ROWS, F32)
            store_rows(target + word * LINE + row * 4, LINE, transpose_rows(square))


@intrinsic
def _separate(typing_context, address, target, element):
    """Sixteen codes of each lane, from words -> vectors of i32, one for each place in the group.

    Lane c of the ``bits / 2`` words at ``address`` has 16 codes of row c, the first in the lowest bits.
    """
    words, size = Vector("i32", LANES), _element(element).bits

    def generate(context, builder, signature, args):
        def at(first: Any, number: int) -> Any:
            return builder.add(first, ir.Constant(first.type, number * LINE))

        def constant(number: int) -> Any:
            return ir.Constant(words.llvm, [number] * LANES)

        values = [load_at(builder, at(args[0], number), words) for number in range(size // 2)]
        for place in range(ROWS):
            word, low = divmod(place * size, 32)
            code = builder.lshr(values[word], constant(low))
            if low + size > 32:  # the rest is in the next word
                code = builder.or_(code, builder.shl(values[word + 1], constant(32 - low)))
            code = builder.and_(code, constant((1 << size) - 1))
            builder.store(code, pointer(builder, at(args[1], place), code.type)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, element), generate


# ---- scales ------------------------------------------------------------------------------------------


@inner
def _collect_bytes(scales, stride, lanes, count, scratch):
    """Bytes [lanes, count] -> [count, LANES]."""
    for lane in range(lanes):
        for number in range(count):
            store(scratch + BYTES + number * LANES + lane, load(scales + lane * stride + number, 1, "u8"))


def find_factors(
    scales, row_step, block_step, tile_rows, amax, amax_step, constant, row, lanes, column, groups, scratch, rule
):
    """What the codes of each row of the operand (lane) and each group of 16 columns are multiplied by.

    Scales are ``row_step`` bytes apart for the next ``tile_rows`` rows, ``block_step`` for the next block.
    """


@overloaded(find_factors)
def _find_factors(
    scales, row_step, block_step, tile_rows, amax, amax_step, constant, row, lanes, column, groups, scratch, rule
):
    def fp32(
        scales, row_step, block_step, tile_rows, amax, amax_step, constant, row, lanes, column, groups, scratch, rule
    ):
        for lane in range(lanes):
            at = (row + lane) // tile_rows * row_step + column // HEIGHT * block_step
            store(scratch + FACTORS + lane * 4, load(scales + at, 1, "f32"))
        factor = load(scratch + FACTORS, LANES, "f32")
        for group in range(1, groups):
            store(scratch + FACTORS + group * LINE, factor)

    def two_level(
        scales, row_step, block_step, tile_rows, amax, amax_step, constant, row, lanes, column, groups, scratch, rule
    ):
        _collect_bytes(scales + row * row_step + column // 16, row_step, lanes, groups, scratch)
        for lane in range(lanes):
            store(scratch + AMAXES + lane * 4, load(amax + (row + lane) * amax_step, 1, "f32"))
        here = load(scratch + AMAXES, LANES, "f32")
        for group in range(groups):
            value = decode_element(widen(load(scratch + BYTES + group * LANES, LANES, "u8")), E4M3_TAG)
            store(scratch + FACTORS + group * LINE, (value * here) * constant)

    def powers_of_two(
        scales, row_step, block_step, tile_rows, amax, amax_step, constant, row, lanes, column, groups, scratch, rule
    ):
        _collect_bytes(scales + row * row_step + column // 32, row_step, lanes, groups // 2, scratch)
        for group in range(groups):
            byte = widen(load(scratch + BYTES + group // 2 * LANES, LANES, "u8"))
            store(scratch + FACTORS + group * LINE, e8m0_value_vector(byte))

    return {"fp32": fp32, "two_level": two_level}.get(rule.tag, powers_of_two)


# ---- numbers -----------------------------------------------------------------------------------------


def undo_rotation(values, rotation):
    """Undo the rotation that the tag names, if any, of 16 vectors in memory."""


@overloaded(undo_rotation)
def _undo_rotation(values, rotation):
    if rotation.tag == "none":
        return lambda values, rotation: None
    mask = int(rotation.tag)

    def undo(values, rotation):
        for lane in range(0, LANES, 16):
            store_rows(values + lane * 4, LINE, unrotate_rows(load_rows(values + lane * 4, LINE, 16, F32), mask))

    return undo


@inner
def _write(values, out, out_stride, dtype, streaming):
    for row in range(ROWS):
        put(out + row * out_stride, load(values + row * LINE, LANES, "f32"), dtype, streaming)


@inner
def _write_all(values, out, out_stride, narrow, streaming):
    """16 rows, all lanes. What is asked for is found out here, so that there are not four kernels."""
    if narrow and streaming:
        _write(values, out, out_stride, BF16, YES)
    elif narrow:
        _write(values, out, out_stride, BF16, NO)
    elif streaming:
        _write(values, out, out_stride, F32, YES)
    else:
        _write(values, out, out_stride, F32, NO)


@inner
def _write_some(values, out, out_stride, rows, lanes, narrow, edge):
    """Some rows, some lanes."""
    for row in range(rows):
        v = load(values + row * LINE, LANES, "f32")
        if narrow:
            put(edge, v, BF16, NO)
        else:
            put(edge, v, F32, NO)
        _copy(edge, out + row * out_stride, lanes * (2 if narrow else 4))


@kernel
def decode_turned(
    codes, codes_stride, scales, row_step, block_step, tile_rows, amax, amax_step, constant, out, first, last,
    height, width, scratch, narrow, streaming, element, rule, rotation,
):  # fmt: skip
    """Tiles ``first:last`` of 128 rows of the matrix ``out`` [height, width], from the operand [width, height].

    ``narrow``: the matrix is bf16. ``streaming`` writes past the caches. ``scratch`` is of ``SCRATCH`` bytes.
    The scales are told about as in `find_factors`.
    """
    size, bits = 2 if narrow else 4, bits_of_code(element)
    values = scratch + VALUES
    for tile in range(first, last):
        top = tile * HEIGHT
        high = min(HEIGHT, height - top)
        groups = (high + ROWS - 1) // ROWS
        for left in range(0, width, LANES):
            lanes = min(LANES, width - left)
            source = codes + left * codes_stride + top * bits // 8
            if high == HEIGHT and lanes == LANES:
                _turn(source, codes_stride, scratch + WORDS, HEIGHT * bits // 32)
            else:
                for lane in range(lanes):
                    _copy(source + lane * codes_stride, scratch + PART + lane * HEIGHT, high * bits // 8)
                _turn(scratch + PART, HEIGHT, scratch + WORDS, HEIGHT * bits // 32)
            find_factors(
                scales, row_step, block_step, tile_rows, amax, amax_step, constant, left, lanes, top, groups,
                scratch, rule,
            )  # fmt: skip
            for group in range(groups):
                _separate(scratch + WORDS + group * bits // 2 * LINE, values, element)
                factor = load(scratch + FACTORS + group * LINE, LANES, "f32")
                for row in range(ROWS):
                    v = decode_element(load(values + row * LINE, LANES, "i32"), element)
                    store(values + row * LINE, v * factor)
                undo_rotation(values, rotation)
                target = out + (top + group * ROWS) * width * size + left * size
                rows = min(ROWS, high - group * ROWS)
                if rows == ROWS and lanes == LANES:
                    _write_all(values, target, width * size, narrow, streaming)
                else:
                    _write_some(values, target, width * size, rows, lanes, narrow, scratch + EDGE)
