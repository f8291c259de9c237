"""Finding the largest magnitude: of the tensor, of each row or column, of the rotated tensor.

Magnitudes are compared by their bits. Where NaNs are not looked out for, one shows as more than Inf.
"""

from __future__ import annotations

import numpy as np

from .compiling import kernel
from .elements import INFINITY_BITS, input_size, load_input, magnitude_bits
from .nvfp4_blocks import rotated
from .simd import largest, load, maximum, splat, store, store_i32
from .tags import YES
from .tiles import amax_of_rows, load_rows


@kernel
def of_all(x, start, stop, dtype, with_nan):
    """Of elements ``start:stop``."""
    size = input_size(dtype)
    best = splat(0, 32, "i32")
    position = start
    while position + 32 <= stop:
        best = maximum(best, magnitude_bits(load_input(x + position * size, 32, dtype), with_nan))
        position += 32
    bits = largest(best)
    while position < stop:
        bits = max(bits, largest(magnitude_bits(load_input(x + position * size, 1, dtype), with_nan)))
        position += 1
    return np.int64(bits)


@kernel
def of_rows(x, x_stride, out, first, last, cols, dtype):
    """Of each of the rows ``first:last``, NaNs aside."""
    size = input_size(dtype)
    whole = cols // 32 * 32
    for row in range(first, last):
        source = x + row * x_stride
        best = splat(0, 32, "i32")
        for col in range(0, whole, 32):
            best = maximum(best, magnitude_bits(load_input(source + col * size, 32, dtype), YES))
        bits = largest(best)
        for col in range(whole, cols):
            bits = max(bits, largest(magnitude_bits(load_input(source + col * size, 1, dtype), YES)))
        store_i32(out + row * 4, bits)
    return np.int64(0)


@kernel
def of_columns(x, x_stride, out, first, last, cols, dtype):
    """Of each column in the rows ``first:last``, NaNs aside; ``out`` is zeros at first."""
    size = input_size(dtype)
    whole = cols // 32 * 32
    for row in range(first, last):
        source = x + row * x_stride
        for col in range(0, whole, 32):
            bits = magnitude_bits(load_input(source + col * size, 32, dtype), YES)
            store(out + col * 4, maximum(bits, load(out + col * 4, 32, "i32")))
        for col in range(whole, cols):
            bits = magnitude_bits(load_input(source + col * size, 1, dtype), YES)
            store(out + col * 4, maximum(bits, load(out + col * 4, 1, "i32")))
    return np.int64(0)


@kernel
def of_rotated(x, x_stride, first, last, cols, dtype, rotation):
    """Of the rotated strips ``first:last`` of 16 rows."""
    size = input_size(dtype)
    worst = 0
    for strip in range(first, last):
        best = splat(0, 16, "i32")
        for start in range(0, cols, 16):
            col = min(start, cols - 16)
            rows = load_rows(x + strip * 16 * x_stride + col * size, x_stride, 16, dtype)
            best = maximum(best, amax_of_rows(rotated(rows, rotation)))
        worst = max(worst, largest(best))
        if worst > INFINITY_BITS:
            return worst
    return worst
