"""Write one plane from a tile of its operand, with blocks along an axis: every format but those of two levels."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import (
    fp8_or_software_codes,
    hashed,
    nearest_codes,
    reciprocal,
    stochastic_codes,
    stream_keys,
    without_nan,
)
from .scales import block_scale, fp32_factor
from .sixteens import halves


@triton.jit
def write_blocks(
    v, r0, c0, R, C, codes, code_stride, scales, scale_r, scale_c, amax, given, seed, top, left, width,
    KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of the tile ``v`` [BR, BC] of an operand [R, C], which begins at (r0, c0).

    Args:
        v: fp32 numbers, 0 outside of the operand.
        codes: the codes of the operand. Rows are ``code_stride`` bytes apart (columns, if not `operand_major`).
        scales: the scales of the operand, with strides ``scale_r`` and ``scale_c``.
        amax: the amax of the tensor, for one scale per tensor.
        given: the scale of the tensor, if it is given.
        seed: pointer to the seed of stochastic rounding.
        top, left, width: where the matrix lies in a larger one, in which random words are counted.
        WIDE: offsets inside of a tile need 64 bits.
    """
    PLANE: tl.constexpr = KIND.plane
    BR: tl.constexpr = v.shape[0]
    BC: tl.constexpr = v.shape[1]
    if PLANE.block_rows == 0:
        factor = tensor_factor(amax, given, KIND)
        if (r0 == 0) & (c0 == 0):
            tl.store(scales, reciprocal(factor))
        scaled = v * factor
    else:
        rows: tl.constexpr = PLANE.block_rows
        length: tl.constexpr = PLANE.block_length
        parts = tl.reshape(v, (BR // rows, rows, BC // length, length))
        largest = without_nan(tl.max(tl.max(tl.abs(parts), axis=3), axis=1))
        stored, factor = block_scale(largest, KIND)
        scaled = tl.reshape(parts * factor[:, None, :, None], (BR, BC))
        store_scales(stored, r0, c0, R, C, scales, scale_r, scale_c, BR, PLANE)
    if KIND.stochastic:
        fraction = random_fractions(r0, c0, seed, top, left, width, BR, BC, KIND)
        store_codes(stochastic_codes(scaled, fraction, PLANE.element), r0, c0, R, C, codes, code_stride, PLANE, WIDE)
    elif PLANE.element.bits == 8:
        store_bytes(
            fp8_or_software_codes(scaled, PLANE.element, PLANE.hardware.fp8), r0, c0, R, C, codes, code_stride,
            PLANE.operand_major, WIDE,
        )  # fmt: skip
    else:
        store_codes(nearest_codes(scaled, PLANE.element), r0, c0, R, C, codes, code_stride, PLANE, WIDE)


@triton.jit
def tensor_factor(amax, given, KIND: tl.constexpr):
    """The factor of a tensor with one scale: the given one, or from its amax."""
    if KIND.given_scale:
        return tl.load(given)
    else:
        return fp32_factor(tl.load(amax), KIND)


@triton.jit
def store_scales(stored, r0, c0, R, C, scales, scale_r, scale_c, BR: tl.constexpr, PLANE: tl.constexpr, only=None):
    """Store the scales of the blocks of a tile, [rows of blocks, blocks along a row]; ``only`` some, if it is given."""
    rows: tl.constexpr = PLANE.block_rows
    high: tl.constexpr = stored.shape[0]
    long: tl.constexpr = stored.shape[1]
    if PLANE.replicated:
        stored = tl.reshape(tl.broadcast_to(stored[:, None, :], (high, rows, long)), (BR, long))
        line = r0 + tl.arange(0, BR)
        inside = line < R
    else:
        line = r0 // rows + tl.arange(0, high)
        inside = line * rows < R
    block = c0 // PLANE.block_length + tl.arange(0, long)
    inside = inside[:, None] & (block * PLANE.block_length < C)[None, :]
    if only is not None:
        if PLANE.replicated:
            only = tl.reshape(tl.broadcast_to(only[:, None, :], (high, rows, long)), (BR, long))
        inside = inside & only
    to = line.to(tl.int64)[:, None] * scale_r + block.to(tl.int64)[None, :] * scale_c
    if PLANE.rule != "fp32":
        stored = stored.to(tl.uint8)
    tl.store(scales + to, stored, mask=inside)


@triton.jit
def store_codes(values, r0, c0, R, C, codes, code_stride, PLANE: tl.constexpr, WIDE: tl.constexpr):
    """Pack the codes (int32) of a tile into bytes, and store them."""
    if PLANE.element.bits == 8:
        store_bytes(values.to(tl.uint8), r0, c0, R, C, codes, code_stride, PLANE.operand_major, WIDE)
    elif PLANE.element.bits == 4:
        even, odd = halves(values)
        packed = (even | (odd << 4)).to(tl.uint8)
        store_bytes(packed, r0, c0 // 2, R, C // 2, codes, code_stride, True, WIDE)
    else:
        first, second = halves(values)
        a, c = halves(first)
        b, d = halves(second)
        word = a | (b << 6) | (c << 12) | (d << 18)
        for i in tl.static_range(3):
            store_strided_bytes((word >> (8 * i)) & 0xFF, r0, c0 // 4, R, C // 4, codes + i, code_stride, 3)


@triton.jit
def store_bytes(values, r0, c0, R, C, codes, stride, OPERAND_MAJOR: tl.constexpr, WIDE: tl.constexpr, only=None):
    """Store a tile [BR, BC] of bytes of a matrix [R, C], in rows that are ``stride`` apart, or in columns.

    Only some are stored if ``only`` is given.
    """
    r = tl.arange(0, values.shape[0])
    c = tl.arange(0, values.shape[1])
    inside = (r0 + r < R)[:, None] & (c0 + c < C)[None, :]
    if only is not None:
        inside = inside & only
    near_r, near_c = r, c
    if WIDE:
        near_r, near_c = r.to(tl.int64), c.to(tl.int64)
    if OPERAND_MAJOR:
        to = codes + (r0.to(tl.int64) * stride + c0) + (near_r[:, None] * stride + near_c[None, :])
    else:
        to = codes + (c0.to(tl.int64) * stride + r0) + (near_c[None, :] * stride + near_r[:, None])
    tl.store(to, values, mask=inside)


@triton.jit
def store_strided_bytes(values, r0, c0, R, C, codes, stride, STEP: tl.constexpr):
    """Store bytes of which neighbours in a row are ``STEP`` apart."""
    r = tl.arange(0, values.shape[0])
    c = tl.arange(0, values.shape[1])
    inside = (r0 + r < R)[:, None] & (c0 + c < C)[None, :]
    to = codes + (r0 + r).to(tl.int64)[:, None] * stride + ((c0 + c) * STEP)[None, :]
    tl.store(to, values.to(tl.uint8), mask=inside)


@triton.jit
def random_fractions(r0, c0, seed, top, left, width, BR: tl.constexpr, BC: tl.constexpr, KIND: tl.constexpr):
    """Random bytes [BR, BC] as `stochastic_codes` wants them. Four neighbours along a row share a word."""
    key0, key1 = stream_keys(tl.load(seed), KIND.plane.rowwise)
    counter = word_counters(
        r0 + tl.arange(0, BR)[:, None], c0 + 4 * tl.arange(0, BC // 4)[None, :], top, left, width, KIND
    )
    words = hashed(counter, key0, key1)
    four = words[:, :, None] >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]
    return tl.reshape(((four & 0xFF) << 15).to(tl.int32, bitcast=True), (BR, BC))


@triton.jit
def word_counters(r, c, top, left, width, KIND: tl.constexpr):
    """The counters of the random words for the numbers at (r, c) of an operand, where c is a multiple of four."""
    if KIND.wide_counter:
        r, c = r.to(tl.int64), c.to(tl.int64)
    if KIND.plane.rowwise:
        return (r + top) * ((width + 3) // 4) + (c + left) // 4
    else:
        return (c + top) // 4 * width + (r + left)
