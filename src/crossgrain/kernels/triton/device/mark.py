"""`mark_kernel`: NaNs and infinities in planes that do not show them, see `kernels.marks`."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import INFINITY, MAGNITUDE, bits_of, float_of
from .decode import decoded_tile
from .encode_blocks import store_bytes, store_scales
from .tiles import group_of_tile, loaded_tile


@triton.jit
def mark_kernel(
    x, x_m, x_k, M, K, groups, table, nonfinite, codes, code_stride, scales, scale_r, scale_c, amax,
    PLANE: tl.constexpr, NAN_SCALE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    KNOWN: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Make numbers of the tile of this program NaN where ``x`` is not finite, and what was encoded is.

    With ``KNOWN``, nothing is done if ``nonfinite`` is 0, which is nearly always so. ``NAN_SCALE`` is the byte of a
    block scale that is NaN.
    """
    across = tl.cdiv(K, BK)
    k0 = tl.program_id(0) % across * BK
    down = tl.program_id(0) // across
    m0 = down * BM
    if KNOWN:
        if tl.load(nonfinite) == 0:
            return
    if GROUPED:
        group, m0, line, first, M = group_of_tile(groups, table, down)
        x += first * x_m
        own = line + (2 if PLANE.rowwise else 7)
        codes += tl.load(own)
        scales += tl.load(own + 1)
        code_stride = tl.load(own + 2)
        scale_r = tl.load(own + 3)
        scale_c = tl.load(own + 4)
        if PLANE.rule == "two_level":
            if PLANE.row_amax:
                amax += first if PLANE.rowwise else group * K
            else:
                amax += group
    tile = loaded_tile(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE)
    if PLANE.rowwise:
        mark_tile(
            tile, m0, k0, M, K, codes, code_stride, scales, scale_r, scale_c, amax, PLANE, NAN_SCALE, BM, BK, WIDE
        )  # fmt: skip
    else:
        mark_tile(
            tl.trans(tile), k0, m0, K, M, codes, code_stride, scales, scale_r, scale_c, amax, PLANE, NAN_SCALE,
            BK, BM, WIDE,
        )  # fmt: skip


@triton.jit
def mark_tile(
    numbers, r0, c0, R, C, codes, code_stride, scales, scale_r, scale_c, amax,
    PLANE: tl.constexpr, NAN_SCALE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mark the tile [BR, BC] of an operand [R, C] that begins at (r0, c0), whose input is ``numbers``."""
    unrotate: tl.constexpr = PLANE.rotation >= 0
    v = decoded_tile(
        codes, code_stride, scales, scale_r, scale_c, amax, r0, c0, R, C, PLANE, True, unrotate, BR, BC, WIDE
    )  # fmt: skip
    lost = ((bits_of(v) & MAGNITUDE) < INFINITY) & ((bits_of(numbers) & MAGNITUDE) >= INFINITY)
    if PLANE.element.bits == 8 and PLANE.element.has_nan:
        nan = tl.full((BR, BC), PLANE.element.nan_code, tl.uint8)
        store_bytes(nan, r0, c0, R, C, codes, code_stride, PLANE.operand_major, WIDE, lost)
    else:
        rows: tl.constexpr = PLANE.block_rows
        length: tl.constexpr = PLANE.block_length
        parts = tl.reshape(lost.to(tl.int32), (BR // rows, rows, BC // length, length))
        bad = tl.max(tl.max(parts, axis=3), axis=1)
        if PLANE.rule == "fp32":
            nan = float_of(tl.full(bad.shape, 0x7FC00000, tl.int32))
        else:
            nan = tl.full(bad.shape, NAN_SCALE, tl.int32)
        store_scales(nan, r0, c0, R, C, scales, scale_r, scale_c, BR, PLANE, bad != 0)
