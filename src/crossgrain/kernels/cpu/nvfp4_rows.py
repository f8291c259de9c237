"""NVFP4 rowwise where blocks cannot be encoded one by one: 16x16 tiles, and 4-over-6.

Sixteen blocks are turned, so that they can be worked on side by side.
"""

from __future__ import annotations

from .compiling import inner, kernel
from .elements import INFINITY_BITS, input_size, load_input
from .nvfp4_blocks import encode_blocks, note_scales, write_lines
from .simd import alternating, load, load_f32, narrow, splat, store
from .tags import F32, Tag
from .tiles import load_rows, prefetch_rows, store_rows, transpose_rows

NOT_ROTATED = Tag("none")

# Scratch: 16 blocks, the same turned, words of codes, scales of lines and of blocks.
TURNED, WORDS, LINES, SCALES, SCRATCH = 1024, 2048, 3072, 3200, 3264


@kernel
def tile_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, amaxes, bound,
    first, last, cols, scratch, key0, key1, origin, row_words, dtype, stochastic, four_over_six,
):  # fmt: skip
    """A scale per 16x16 tile, stored for each of its rows; strips of 16 rows. Stops at a NaN."""
    size, best = input_size(dtype), 0
    turned, words, lines = scratch + TURNED, scratch + WORDS, scratch + LINES
    for strip in range(first, last):
        top = strip * 16
        encode_scale, decode_scale = load(encode_scales + top * 4, 16, "f32"), load(decode_scales + top * 4, 16, "f32")
        amax = load(amaxes + top * 4, 16, "f32")
        for left in range(0, cols, 128):
            groups = min(8, (cols - left) // 16)
            for group in range(groups):
                col = left + group * 16
                source = x + top * x_stride + col * size
                prefetch_rows(source + 128 * size, x_stride)
                store_rows(turned, 64, transpose_rows(load_rows(source, x_stride, 16, dtype)))
                bits = encode_blocks(
                    turned, 64, words + group * 128, scratch + SCALES, encode_scale, decode_scale, amax, bound, True,
                    origin + top * row_words + col // 4, row_words, 1, key0, key1,
                    F32, NOT_ROTATED, stochastic, four_over_six,
                )  # fmt: skip
                best = max(best, bits)
                if best > INFINITY_BITS:
                    return best
                note_scales(lines, load(scratch + SCALES, 16, "i32"), group)
            write_lines(
                words, lines, groups, codes + top * codes_stride + left // 2, codes_stride,
                scales + top * scales_stride + left // 16, scales_stride, scratch,
            )  # fmt: skip
    return best


@kernel
def block_rows(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, amaxes, bound,
    first, last, cols, scratch, key0, key1, origin, row_words, dtype, stochastic, four_over_six,
):  # fmt: skip
    """A scale per 16 numbers of a row. Stops at a NaN."""
    size, best = input_size(dtype), 0
    turned, words = scratch + TURNED, scratch + WORDS
    for row in range(first, last):
        encode_scale = splat(load_f32(encode_scales + row * 4), 16, "f32")
        decode_scale = splat(load_f32(decode_scales + row * 4), 16, "f32")
        amax = splat(load_f32(amaxes + row * 4), 16, "f32")
        for col in range(0, cols, 256):
            blocks = min(16, (cols - col) // 16)
            source = x + row * x_stride + col * size
            target, scale = codes + row * codes_stride + col // 2, scales + row * scales_stride + col // 16
            prefetch_rows(source + 256 * size, 16 * size)
            if blocks == 16:
                store_rows(turned, 64, transpose_rows(load_rows(source, 16 * size, 16, dtype)))
            else:
                _some_blocks(source, blocks, scratch, dtype)
                store_rows(turned, 64, transpose_rows(load_rows(scratch, 64, 16, F32)))
            bits = encode_blocks(
                turned, 64, words, scratch + SCALES, encode_scale, decode_scale, amax, bound, False,
                origin + row * row_words + col // 4, 4, 1, key0, key1, F32, NOT_ROTATED, stochastic, four_over_six,
            )  # fmt: skip
            best = max(best, bits)
            if best > INFINITY_BITS:
                return best
            low, high, stored = load(words, 16, "i32"), load(words + 64, 16, "i32"), load(scratch + SCALES, 16, "i32")
            if blocks == 16:
                store(target, alternating(low, high))
                store(scale, narrow(stored))
            else:
                store(scratch, alternating(low, high))
                store(scratch + 128, narrow(stored))
                for block in range(blocks):
                    store(target + block * 8, load(scratch + block * 8, 8, "u8"))
                    store(scale + block, load(scratch + 128 + block, 1, "u8"))
    return best


@inner
def _some_blocks(source, blocks, scratch, dtype):
    """Blocks of 16, and zeros in the place of those that there are not."""
    for block in range(16):
        store(scratch + block * 64, splat(0, 16, "i32"))
    for block in range(blocks):
        store(scratch + block * 64, load_input(source + block * 16 * input_size(dtype), 16, dtype))
