"""NVFP4 columnwise: codes [K, M / 2], transposed, perhaps rotated, perhaps with a rowwise plane on the way.

A tile is 128 rows high, so that a column of it fills a cache line of the transposed result: 8 blocks of
16 rows, 8 bytes each. They are collected in a buffer and written line by line.
"""

from __future__ import annotations

from .compiling import kernel
from .elements import INFINITY_BITS, input_size, load_input
from .nvfp4_blocks import encode_blocks
from .rows import call_run
from .simd import load, load_f32, store


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
    lines, bytes_ = scratch + 16 * width * 4, scratch + (16 * 4 + 64) * width
    run_scratch = scratch + (16 * 4 + 64 + 8) * width
    for tile in range(first, last):
        top = tile * 128
        groups = min(8, (height - top) // 16)
        start = 0
        while start < cols:
            left = min(start, cols - width)  # the last strip may overlap the one before
            for group in range(groups):
                for row in range(16):
                    at = top + group * 16 + row
                    source = x + at * x_stride + left * size
                    position = 0
                    while position < width:
                        col = min(position, width - 32)
                        store(scratch + (row * width + col) * 4, load_input(source + col * size, 32, dtype))
                        position += 32
                    if run:
                        call_run(run, (
                            source, width, row_codes + at * row_codes_stride + left * row_bits // 8,
                            row_scales + at * row_scales_stride + left // row_block,
                            load_f32(row_encode_scales + at * row_scale_step),
                            load_f32(row_decode_scales + at * row_scale_step),
                            run_scratch, row_origin + at * words_of_row + left // 4, 1, row_key0, row_key1,
                        ))  # fmt: skip
                position = 0
                while position < width:
                    col = min(position, width - 16)
                    at = left + col
                    bits = encode_blocks(
                        scratch + col * 4, width * 4, lines + col * 64 + group * 8, 64, bytes_ + col * 8 + group, 8,
                        load(encode_scales + at * 4, 16, "f32"), load(decode_scales + at * 4, 16, "f32"),
                        load(amaxes + at * 4, 16, "f32"), bound, square,
                        origin + (top // 4 + group * 4) * row_words + at, 1, row_words, key0, key1,
                        rotation, stochastic, four_over_six,
                    )  # fmt: skip
                    best = max(best, bits)
                    if best > INFINITY_BITS:
                        return best
                    position += 16
            for col in range(width):
                target = codes + (left + col) * codes_stride + tile * 64
                scale = scales + (left + col) * scales_stride + tile * 8
                if groups == 8:
                    store(target, load(lines + col * 64, 64, "u8"))
                    store(scale, load(bytes_ + col * 8, 8, "u8"))
                else:
                    for group in range(groups):
                        store(target + group * 8, load(lines + col * 64 + group * 8, 8, "u8"))
                        store(scale + group, load(bytes_ + col * 8 + group, 1, "u8"))
            start += width
    return best
