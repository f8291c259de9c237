"""Columnwise planes that are stored transposed: a tile of the input is turned, then encoded along its rows.

A tile is 128 rows high, so that what it gives of a transposed row fills a cache line or more.
"""

from __future__ import annotations

from .compiling import inner, kernel
from .elements import input_size, load_input
from .rows import call_run
from .simd import load_f32, store
from .tiles import ROWS, load_rows, store_rows, transpose_rows

HEIGHT = 128
PITCH = (HEIGHT + 16) * 4  # bytes from one turned row to the next; not a power of two, for the cache's sake


@inner
def _turn(x, x_stride, height, width, turned, dtype):
    """x [height, width] -> turned [width, height]; the height is a multiple of 16."""
    size = input_size(dtype)
    whole = width // ROWS * ROWS
    for row in range(0, height, ROWS):
        source, target = x + row * x_stride, turned + row * 4
        for col in range(0, whole, ROWS):
            square = load_rows(source + col * size, x_stride, ROWS, dtype)
            store_rows(target + col * PITCH, PITCH, transpose_rows(square))
        for col in range(whole, width):
            for below in range(ROWS):
                number = load_input(source + below * x_stride + col * size, 1, dtype)
                store(target + col * PITCH + below * 4, number)


@kernel
def encode_columns(
    x, x_stride, run, bits, block, codes, codes_stride, scales, scales_stride, encode_scales, decode_scales, scale_step,
    first, last, height, cols, width, scratch, key0, key1, origin, row_words, dtype,
):  # fmt: skip
    """Tiles ``first:last`` of 128 rows: x [height, cols] -> a plane [cols, height], as `encode_rows` would.

    ``scratch`` is ``width`` turned rows, and what a run needs. ``origin`` is the counter of the first random word,
    ``row_words`` the number of words from four rows of x to the next four.
    """
    run_scratch, best = scratch + width * PITCH, 0
    for tile in range(first, last):
        top = tile * HEIGHT
        high = min(HEIGHT, height - top)
        for left in range(0, cols, width):
            here = min(width, cols - left)
            _turn(x + top * x_stride + left * input_size(dtype), x_stride, high, here, scratch, dtype)
            for col in range(here):
                at = left + col
                found = call_run(run, (
                    scratch + col * PITCH, high,
                    codes + at * codes_stride + top * bits // 8, scales + at * scales_stride + top // block,
                    load_f32(encode_scales + at * scale_step), load_f32(decode_scales + at * scale_step),
                    run_scratch, origin + (top // 4) * row_words + at, row_words, key0, key1,
                ))  # fmt: skip
                best = max(best, found)
    return best
