"""NVFP4 with a scale per 16x16 tile, both planes in one pass: both directions have the same codes and scales.

Words of codes are made as for columns (see `nvfp4_columns`). The rowwise plane gets the same codes, turned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import inner, kernel
from .elements import INFINITY_BITS, input_size
from .nvfp4_blocks import encode_blocks, note_scales, write_lines
from .nvfp4_rows import NOT_ROTATED
from .simd import Vector, load, load_f32, load_u8, pointer, splat, store, store_u8
from .tags import NO, Tag
from .tiles import prefetch_rows

_ONE_SCALE = Tag("none")  # in the place of a way to choose between two


def scratch_bytes(width: int) -> int:
    """What `both` needs for strips of so many columns."""
    return width // 16 * (8 * 128 + 128 + 16) + _BLOCK + _EDGE


_BLOCK, _EDGE = 64, 1024  # bytes: scales of a block, lines that are not full


@kernel
def both(
    x, x_stride, row_codes, row_codes_stride, row_scales, row_scales_stride, codes, codes_stride, scales,
    scales_stride, encode_scale, decode_scale, first, last, height, cols, width, scratch, dtype,
):  # fmt: skip
    """Tiles ``first:last`` of 128 rows; strips of ``width`` columns, a multiple of 16. Stops at a NaN."""
    size, best, blocks = input_size(dtype), 0, width // 16
    encode, decode = splat(load_f32(encode_scale), 16, "f32"), splat(load_f32(decode_scale), 16, "f32")
    noted = scratch + blocks * 1024
    line = noted + blocks * 128
    block = line + blocks * 16
    for tile in range(first, last):
        top = tile * 128
        groups = min(8, (height - top) // 16)
        start = 0
        while start < cols:
            left = min(start, cols - width)  # the last strip may overlap the one before
            for group in range(groups):
                row = top + group * 16
                source = x + row * x_stride + left * size
                following = source + 16 * x_stride if group + 1 < groups else x + top * x_stride + (left + width) * size
                for strip in range(blocks):
                    prefetch_rows(following + strip * 16 * size, x_stride)
                    words = scratch + strip * 1024 + group * 128
                    bits = encode_blocks(
                        source + strip * 16 * size, x_stride, words, block, encode, decode, encode, 1.0, True,
                        0, 0, 0, 0, 0, dtype, NOT_ROTATED, NO, _ONE_SCALE,
                    )  # fmt: skip
                    best = max(best, bits)
                    if best > INFINITY_BITS:
                        return best
                    note_scales(noted + strip * 128, load(block, 16, "i32"), group)
                    store_u8(line + strip, load_u8(block))
                    at = row_codes + row * row_codes_stride + (left + strip * 16) // 2
                    store_turned(at, row_codes_stride, load(words, 16, "i32"), load(words + 64, 16, "i32"))
                for each in range(row, row + 16):
                    _copy(line, row_scales + each * row_scales_stride + left // 16, blocks)
            for strip in range(blocks):
                at = left + strip * 16
                write_lines(
                    scratch + strip * 1024, noted + strip * 128, groups, codes + at * codes_stride + tile * 64,
                    codes_stride, scales + at * scales_stride + tile * 8, scales_stride, block + _BLOCK,
                )  # fmt: skip
            start += width
    return best


@inner
def _copy(source, target, count):
    whole = count // 16 * 16
    for at in range(0, whole, 16):
        store(target + at, load(source + at, 16, "u8"))
    for at in range(whole, count):
        store_u8(target + at, load_u8(source + at))


@intrinsic
def store_turned(typing_context, address, stride, low, high):
    """Codes of a tile by columns, lane c of two i32 vectors, as 16 rows of 8 bytes that are ``stride`` bytes apart.

    Row r of a column is nibble r of its lane: the first eight rows in ``low``, the others in ``high``.
    """
    bytes_, pairs = (ir.VectorType(ir.IntType(bits), 512 // bits) for bits in (8, 16))
    halves = ir.VectorType(ir.IntType(8), 32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride, *columns = args
        order = [lane * 4 + byte for byte in range(4) for lane in range(16)]

        def every(number: int) -> Any:
            return ir.Constant(pairs, [number] * 32)

        def row(number: int, found: Any, at: int) -> None:
            place = builder.add(address, builder.mul(stride, ir.Constant(stride.type, number)))
            codes = builder.extract_element(found, ir.Constant(ir.IntType(32), at))
            builder.store(codes, pointer(builder, place, codes.type)).align = 1

        for half, value in enumerate(columns):
            value = builder.bitcast(value, bytes_)
            turned = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), 64), order))
            # Two rows in each byte, of one column; two columns in each pair of bytes.
            two = builder.bitcast(turned, pairs)
            four = builder.lshr(two, every(4))
            even = builder.or_(builder.and_(two, every(0x000F)), builder.and_(four, every(0x00F0)))
            eight = builder.lshr(two, every(8))
            odd = builder.or_(builder.and_(four, every(0x000F)), builder.and_(eight, every(0x00F0)))
            for parity, codes in enumerate((even, odd)):
                found = builder.bitcast(builder.trunc(codes, halves), ir.VectorType(ir.IntType(64), 4))
                for at in range(4):
                    row(8 * half + 2 * at + parity, found, at)
        return context.get_dummy_value()

    assert isinstance(low, Vector) and low == high and low.lanes == 16
    return types.void(types.intp, types.intp, low, high), generate
