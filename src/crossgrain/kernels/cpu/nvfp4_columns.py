"""NVFP4 columnwise: codes [K, M / 2], transposed, perhaps rotated, perhaps with a rowwise plane on the way.

A tile is 128 rows high, so that a column of it fills a cache line of the transposed result: 8 blocks of
16 rows, 8 bytes each. Words of them are collected for 16 columns side by side, turned, and written line by line.
"""

from __future__ import annotations

from .compiling import inner, kernel
from .elements import INFINITY_BITS, input_size
from .nvfp4_blocks import encode_blocks, note_scales, write_lines
from .rows import call_run
from .simd import load, load_f32
from .tiles import prefetch_rows


@kernel
def columns(
    x, x_stride, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, amaxes, bound,
    run, row_bits, row_block, row_codes, row_codes_stride, row_scales, row_scales_stride,
    row_encode_scales, row_decode_scales, row_scale_step,
    first, last, height, cols, width, scratch, key0, key1, origin, row_words,
    row_key0, row_key1, row_origin, words_of_row,
    square, dtype, rotation, stochastic, four_over_six,
):  # fmt: skip
    """Tiles ``first:last`` of 128 rows, with a rowwise plane in the same pass if there is a ``run``.

    There is a global scale and amax for each column. ``scratch`` is (16 * 4 + 64 + 8) * width bytes and
    what a run needs. The row plane is told about as in `encode_rows`.

    Stops as soon as a NaN is met (of the input, or made by the rotation), and returns its bits: then the
    caller starts again with the reference.
    """
    size, best = input_size(dtype), 0
    strips = (width + 15) // 16
    words, noted, block, edge = _scratch(scratch, strips)
    run_scratch = scratch + (16 * 4 + 64 + 8) * width
    for tile in range(first, last):
        top = tile * 128
        groups = min(8, (height - top) // 16)
        start = 0
        while start < cols:
            left = min(start, cols - width)  # the last strip may overlap the one before
            for group in range(groups):
                source = x + (top + group * 16) * x_stride + left * size
                if run:
                    for row in range(16):
                        at = top + group * 16 + row
                        call_run(run, (
                            source + row * x_stride, width, row_codes + at * row_codes_stride + left * row_bits // 8,
                            row_scales + at * row_scales_stride + left // row_block,
                            load_f32(row_encode_scales + at * row_scale_step),
                            load_f32(row_decode_scales + at * row_scale_step),
                            run_scratch, row_origin + at * words_of_row + left // 4, 1, row_key0, row_key1,
                        ))  # fmt: skip
                following = source + 16 * x_stride
                if group + 1 == groups:
                    following = x + top * x_stride + (left + width) * size
                for strip in range(strips):
                    col = min(strip * 16, width - 16)
                    at = left + col
                    prefetch_rows(following + col * size, x_stride)
                    bits = encode_blocks(
                        source + col * size, x_stride, words + strip * 1024 + group * 128, block,
                        load(encode_scales + at * 4, 16, "f32"), load(decode_scales + at * 4, 16, "f32"),
                        load(amaxes + at * 4, 16, "f32"), bound, square,
                        origin + (top // 4 + group * 4) * row_words + at, 1, row_words, key0, key1,
                        dtype, rotation, stochastic, four_over_six,
                    )  # fmt: skip
                    best = max(best, bits)
                    if best > INFINITY_BITS:
                        return best
                    note_scales(noted + strip * 128, load(block, 16, "i32"), group)
            for strip in range(strips):
                at = left + min(strip * 16, width - 16)
                write_lines(
                    words + strip * 1024, noted + strip * 128, groups, codes + at * codes_stride + tile * 64,
                    codes_stride, scales + at * scales_stride + tile * 8, scales_stride, edge,
                )  # fmt: skip
            start += width
    return best


@inner
def _scratch(scratch, strips):
    """Addresses for words of codes, for scales, for the scales of a block, and for lines that are not full.

    Of less than 136 bytes per column the last ones reach into what a run needs, which is not at work then.
    """
    words = scratch
    noted = words + strips * 1024
    return words, noted, noted + strips * 128, noted + strips * 128 + 64
