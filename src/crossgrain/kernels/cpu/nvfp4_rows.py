"""NVFP4 rowwise where blocks cannot be encoded one by one: 16x16 tiles, and 4-over-6.

Sixteen blocks are turned, so that they can be worked on side by side.
"""

from __future__ import annotations

from .compiling import kernel
from .elements import INFINITY_BITS, input_size, load_input
from .nvfp4_blocks import encode_blocks
from .simd import load, load_f32, splat, store
from .tags import F32, Tag
from .tiles import load_rows, store_rows, transpose_rows

NOT_ROTATED = Tag("none")

# Scratch: 16 blocks, the same turned, their codes, their scales.
TURNED, CODES, SCALES, SCRATCH = 1024, 2048, 2176, 2192


@kernel
def tile_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, amaxes, bound,
    first, last, cols, scratch, key0, key1, origin, row_words, dtype, stochastic, four_over_six,
):  # fmt: skip
    """A scale per 16x16 tile, stored for each of its rows; strips of 16 rows. Stops at a NaN."""
    size, best = input_size(dtype), 0
    turned = scratch + TURNED
    for strip in range(first, last):
        top = strip * 16
        encode_scale, decode_scale = load(encode_scales + top * 4, 16, "f32"), load(decode_scales + top * 4, 16, "f32")
        amax = load(amaxes + top * 4, 16, "f32")
        for col in range(0, cols, 16):
            store_rows(turned, 64, transpose_rows(load_rows(x + top * x_stride + col * size, x_stride, 16, dtype)))
            bits = encode_blocks(
                turned, 64, codes + top * codes_stride + col // 2, codes_stride,
                scales + top * scales_stride + col // 16, scales_stride,
                encode_scale, decode_scale, amax, bound, True,
                origin + top * row_words + col // 4, row_words, 1, key0, key1, NOT_ROTATED, stochastic, four_over_six,
            )  # fmt: skip
            best = max(best, bits)
            if best > INFINITY_BITS:
                return best
    return best


@kernel
def block_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, amaxes, bound,
    first, last, cols, scratch, key0, key1, origin, row_words, dtype, stochastic, four_over_six,
):  # fmt: skip
    """A scale per 16 numbers of a row. Stops at a NaN."""
    size, best = input_size(dtype), 0
    for block in range(16):  # where there are fewer blocks, the others do not matter, but are no NaNs
        store(scratch + block * 64, splat(0, 16, "i32"))
    for row in range(first, last):
        encode_scale = splat(load_f32(encode_scales + row * 4), 16, "f32")
        decode_scale = splat(load_f32(decode_scales + row * 4), 16, "f32")
        amax = splat(load_f32(amaxes + row * 4), 16, "f32")
        for col in range(0, cols, 256):
            blocks = min(16, (cols - col) // 16)
            for block in range(blocks):
                v = load_input(x + row * x_stride + (col + block * 16) * size, 16, dtype)
                store(scratch + block * 64, v)
            store_rows(scratch + TURNED, 64, transpose_rows(load_rows(scratch, 64, 16, F32)))
            bits = encode_blocks(
                scratch + TURNED, 64, scratch + CODES, 8, scratch + SCALES, 1,
                encode_scale, decode_scale, amax, bound, False,
                origin + row * row_words + col // 4, 4, 1, key0, key1, NOT_ROTATED, stochastic, four_over_six,
            )  # fmt: skip
            best = max(best, bits)
            if best > INFINITY_BITS:
                return best
            for block in range(blocks):
                at = col // 16 + block
                store(codes + row * codes_stride + at * 8, load(scratch + CODES + block * 8, 8, "u8"))
                store(scales + row * scales_stride + at, load(scratch + SCALES + block, 1, "u8"))
    return best
