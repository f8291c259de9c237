"""Encoding along columns: a block runs down a column, so 32 columns are done side by side.

A strip of 32 rows is as high as a block. It is read once: the strip is kept in a buffer that stays in
the cache while the largest magnitude of every column is found, and is encoded from there.
"""

from __future__ import annotations

from .compiling import inner, kernel
from .elements import (
    INFINITY_BITS,
    e8m0_reciprocal,
    e8m0_reciprocal_vector,
    e8m0_up,
    e8m0_up_vector,
    encode_element,
    input_size,
    load_input,
    magnitude_bits,
    reciprocal_of_max,
)
from .rows import call_run
from .simd import as_float, bits_of, float_of, largest, load, load_f32, maximum, narrow, splat, store, store_u8
from .tags import NO, YES


@inner
def _strip_columns(buffer, width, codes, codes_stride, scales, factors, element, with_nan):
    """Scales and codes of a strip of 32 rows in ``buffer`` [32, width]. Returns its largest bits.

    Without ``with_nan`` it stops at a NaN, and returns bits above those of Inf.
    """
    best = 0
    for col in range(0, width, 32):
        amax = splat(0, 32, "i32")
        for row in range(32):
            amax = maximum(amax, magnitude_bits(load(buffer + (row * width + col) * 4, 32, "f32"), with_nan))
        best = max(best, largest(amax))
        if best > INFINITY_BITS:
            return best
        byte = e8m0_up_vector(as_float(amax) * reciprocal_of_max(element))
        store(scales + col, narrow(byte))
        store(factors + col * 4, e8m0_reciprocal_vector(byte))
    for row in range(32):
        for col in range(0, width, 32):
            v = load(buffer + (row * width + col) * 4, 32, "f32") * load(factors + col * 4, 32, "f32")
            store(codes + row * codes_stride + col, narrow(encode_element(v, element, with_nan)))
    return best


@kernel
def mx_columns(
    x, x_stride, codes, codes_stride, scales, scales_stride, run, row_bits, row_block, row_codes, row_codes_stride,
    row_scales, row_scales_stride, encode_scales, decode_scales, scale_step, first, last, cols, width, scratch,
    key0, key1, origin, row_words, dtype, element,
):  # fmt: skip
    """MXFP8 columnwise, strips ``first:last`` of 32 rows, with a rowwise plane in the same pass if there is a ``run``.

    codes [rows, cols], scales [rows / 32, cols]; ``scratch`` holds 33 rows of ``width`` floats and what a
    run needs. The row plane is told about as in `encode_rows`.
    """
    size = input_size(dtype)
    factors, run_scratch = scratch + 32 * width * 4, scratch + 33 * width * 4
    best = 0
    for strip in range(first, last):
        top = strip * 32
        for left in range(0, cols, width):
            here = min(width, cols - left)
            for row in range(32):
                at = top + row
                source = x + at * x_stride + left * size
                for col in range(0, here, 32):
                    store(scratch + (row * here + col) * 4, load_input(source + col * size, 32, dtype))
                if run:
                    call_run(run, (
                        source, here, row_codes + at * row_codes_stride + left * row_bits // 8,
                        row_scales + at * row_scales_stride + left // row_block,
                        load_f32(encode_scales + at * scale_step), load_f32(decode_scales + at * scale_step),
                        run_scratch, origin + at * row_words + left // 4, 1, key0, key1,
                    ))  # fmt: skip
            target = codes + top * codes_stride + left
            scale = scales + strip * scales_stride + left
            bits = _strip_columns(scratch, here, target, codes_stride, scale, factors, element, NO)
            if bits > INFINITY_BITS:
                _strip_columns(scratch, here, target, codes_stride, scale, factors, element, YES)
            best = max(best, bits)
    return best


@kernel
def mx_tiles(
    x, x_stride, row_codes, column_codes, row_scales, row_scales_stride, column_scales, column_scales_stride,
    first, last, cols, rows_wanted, columns_wanted, dtype, element,
):  # fmt: skip
    """MXFP8 with a scale per 32x32 tile: both directions have the same codes. Strips of 32 rows."""
    size, best = input_size(dtype), 0
    for strip in range(first, last):
        top = strip * 32
        for col in range(0, cols, 32):
            amax = splat(0, 32, "i32")
            for row in range(32):
                v = load_input(x + (top + row) * x_stride + col * size, 32, dtype)
                amax = maximum(amax, magnitude_bits(v, NO))
            best = max(best, largest(amax))
            clean = largest(amax) <= INFINITY_BITS
            if not clean:
                amax = splat(0, 32, "i32")
                for row in range(32):
                    v = load_input(x + (top + row) * x_stride + col * size, 32, dtype)
                    amax = maximum(amax, magnitude_bits(v, YES))
            byte = e8m0_up(bits_of(float_of(largest(amax)) * reciprocal_of_max(element)))
            factor = e8m0_reciprocal(byte)
            if columns_wanted:
                store(column_scales + strip * column_scales_stride + col, narrow(splat(byte, 32, "i32")))
            for row in range(32):
                v = load_input(x + (top + row) * x_stride + col * size, 32, dtype) * factor
                at = (top + row) * cols + col
                codes = narrow(encode_element(v, element, NO)) if clean else narrow(encode_element(v, element, YES))
                if rows_wanted:
                    store(row_codes + at, codes)
                    store_u8(row_scales + (top + row) * row_scales_stride + col // 32, byte)
                if columns_wanted:
                    store(column_codes + at, codes)
    return best
