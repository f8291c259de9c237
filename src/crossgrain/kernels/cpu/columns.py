"""Encoding along columns: a block runs down a column, so 32 columns are done side by side.

A strip of 32 rows is as high as a block. It is read once: the strip is kept in a buffer that stays in
the cache while the largest magnitude of every column is found, and is encoded from there.
"""

from __future__ import annotations

from .compiling import inner, kernel, overloaded
from .elements import (
    INFINITY_BITS,
    e8m0_reciprocal,
    e8m0_reciprocal_vector,
    e8m0_up,
    e8m0_up_vector,
    encode_element,
    input_size,
    load_input,
    loose_bytes,
    magnitude_bits,
    reciprocal_of_max,
)
from .features import compiled_for
from .rows import call_run
from .simd import (
    as_float,
    bits_of,
    float_of,
    largest,
    load,
    load_f32,
    maximum,
    narrow,
    prefetch,
    splat,
    store,
    store_u8,
)
from .tags import NO, YES


def _side_by_side(lanes):
    @inner
    def encode(x, x_stride, buffer, codes, codes_stride, scales, dtype, element):
        amax = splat(0, lanes, "i32")
        for row in range(32):
            v = load_input(x + row * x_stride, lanes, dtype)
            store(buffer + row * lanes * 4, v)
            amax = maximum(amax, magnitude_bits(v, NO))
        best = largest(amax)
        if best >= INFINITY_BITS:
            return best
        byte = e8m0_up_vector(as_float(amax) * reciprocal_of_max(element))
        store(scales, narrow(byte))
        factor = e8m0_reciprocal_vector(byte)
        for row in range(32):
            for line in range(0, lanes * input_size(dtype), 64):
                prefetch(x + row * x_stride + 64 * input_size(dtype) + line)
            v = load(buffer + row * lanes * 4, lanes, "f32") * factor
            store(codes + row * codes_stride, loose_bytes(v, element))
        return best

    return encode


_all_at_once, _half = _side_by_side(64), _side_by_side(32)


def sixty_four(x, x_stride, buffer, codes, codes_stride, scales, dtype, element):
    """64 columns of 32 rows. Returns their largest bits; if those are of a NaN or Inf, it must be done with care."""


@overloaded(sixty_four)
def _sixty_four(x, x_stride, buffer, codes, codes_stride, scales, dtype, element):
    if compiled_for("avx512f"):  # so many fit into its registers
        return lambda x, x_stride, buffer, codes, codes_stride, scales, dtype, element: _all_at_once(
            x, x_stride, buffer, codes, codes_stride, scales, dtype, element
        )

    def halves(x, x_stride, buffer, codes, codes_stride, scales, dtype, element):
        best = 0
        for col in range(0, 64, 32):
            here = x + col * input_size(dtype)
            bits = _half(here, x_stride, buffer, codes + col, codes_stride, scales + col, dtype, element)
            best = max(best, bits)
        return best

    return halves


@inner
def _thirty_two(x, x_stride, buffer, codes, codes_stride, scales, dtype, element):
    """32 columns of 32 rows, with NaNs or without. Returns their largest bits."""
    amax, usable = splat(0, 32, "i32"), splat(0, 32, "i32")
    for row in range(32):
        v = load_input(x + row * x_stride, 32, dtype)
        store(buffer + row * 128, v)
        amax, usable = maximum(amax, magnitude_bits(v, NO)), maximum(usable, magnitude_bits(v, YES))
    byte = e8m0_up_vector(as_float(usable) * reciprocal_of_max(element))
    store(scales, narrow(byte))
    factor = e8m0_reciprocal_vector(byte)
    for row in range(32):
        v = load(buffer + row * 128, 32, "f32") * factor
        store(codes + row * codes_stride, narrow(encode_element(v, element, YES)))
    return largest(amax)


@inner
def _strip_columns(x, x_stride, width, buffer, codes, codes_stride, scales, dtype, element):
    """Scales and codes of a strip of 32 rows. Returns its largest bits."""
    best, size = 0, input_size(dtype)
    for col in range(0, width, 64):
        wide, bits = min(64, width - col), INFINITY_BITS
        here, target, scale = x + col * size, codes + col, scales + col
        if wide == 64:
            bits = sixty_four(here, x_stride, buffer, target, codes_stride, scale, dtype, element)
        if bits >= INFINITY_BITS:
            bits = 0
            for part in range(0, wide, 32):
                found = _thirty_two(
                    here + part * size, x_stride, buffer, target + part, codes_stride, scale + part, dtype, element
                )
                bits = max(bits, found)
        best = max(best, bits)
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
    size, best = input_size(dtype), 0
    run_scratch = scratch + 33 * width * 4
    for strip in range(first, last):
        top = strip * 32
        for left in range(0, cols, width):
            here = min(width, cols - left)
            for row in range(32):
                at = top + row
                source = x + at * x_stride + left * size
                if run:
                    following = source + here * size if left + here < cols else x + (at + 32) * x_stride
                    for line in range(0, here * size, 64):
                        prefetch(following + line)
                    call_run(run, (
                        source, here, row_codes + at * row_codes_stride + left * row_bits // 8,
                        row_scales + at * row_scales_stride + left // row_block,
                        load_f32(encode_scales + at * scale_step), load_f32(decode_scales + at * scale_step),
                        run_scratch, origin + at * row_words + left // 4, 1, key0, key1,
                    ))  # fmt: skip
            bits = _strip_columns(
                x + top * x_stride + left * size, x_stride, here, scratch,
                codes + top * codes_stride + left, codes_stride, scales + strip * scales_stride + left, dtype, element,
            )  # fmt: skip
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
            clean = largest(amax) < INFINITY_BITS
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
                source = x + (top + row) * x_stride + col * size
                prefetch(source + 32 * size)
                prefetch(source + 48 * size)
                v = load_input(source, 32, dtype) * factor
                at = (top + row) * cols + col
                codes = loose_bytes(v, element) if clean else narrow(encode_element(v, element, YES))
                if rows_wanted:
                    store(row_codes + at, codes)
                    store_u8(row_scales + (top + row) * row_scales_stride + col // 32, byte)
                if columns_wanted:
                    store(column_codes + at, codes)
    return best
