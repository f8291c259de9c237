"""`encode_kernel`: write one or two planes of a matrix, or of groups of its rows, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import INFINITY, MAGNITUDE, bits_of
from .encode_blocks import write_blocks
from .encode_sixteens import write_sixteens
from .sixteens import sixteen_of_rows
from .tiles import aligned, group_of_tile, loaded_columns, loaded_tile


@triton.jit(do_not_specialize=["top", "left", "width"])
def encode_kernel(
    x, x_m, x_k, M, K, seeds, top, left, width, groups, table, nonfinite,
    row_codes, row_code_stride, row_scales, row_scale_r, row_scale_c, row_amax, row_given, row_amax_out,
    col_codes, col_code_stride, col_scales, col_scale_r, col_scale_c, col_amax, col_given, col_amax_out,
    ROW: tl.constexpr, COLUMN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    GROUPED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    WATCH: tl.constexpr,
):  # fmt: skip
    """Write the tile of this program to the planes ``ROW`` and ``COLUMN``, of which one may be None.

    ``groups`` has the group of each tile, and its first row. The planes of a group are those of a matrix of its own.
    ``ALIGNED`` says that all offsets of groups are multiples of 16, and ``EVEN`` that rows and columns are multiples of
    32: Triton stores 16 bytes at once only if it knows this. With ``WATCH``, ``nonfinite`` becomes 1 if there is a NaN
    or an infinity.
    """
    across = tl.cdiv(K, BK)
    k0 = tl.program_id(0) % across * BK
    down = tl.program_id(0) // across
    group = 0
    if GROUPED:
        group, m0, line, first, M = group_of_tile(groups, table, down)
        x += aligned(first * x_m, ALIGNED)
        if ROW is not None:
            row_codes += aligned(tl.load(line + 2), ALIGNED)
            row_scales += tl.load(line + 3)
            row_scale_r = tl.load(line + 5)
            row_scale_c = tl.load(line + 6)
            if ROW.plane.row_amax:
                row_amax += first
                row_amax_out += first
        if COLUMN is not None:
            col_codes += aligned(tl.load(line + 7), ALIGNED)
            col_scales += tl.load(line + 8)
            col_code_stride = aligned(tl.load(line + 9), ALIGNED)
            col_scale_r = tl.load(line + 10)
            col_scale_c = tl.load(line + 11)
            if COLUMN.plane.row_amax:
                col_amax += group * K
                col_amax_out += group * K
    else:
        m0 = down * BM
    shared: tl.constexpr = (ROW is not None and not ROW.plane.sixteen) or (
        COLUMN is not None and not COLUMN.plane.sixteen
    )
    if shared:
        tile = loaded_tile(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE)
        if WATCH:
            note_nonfinite(largest_bits(tile), nonfinite)
    if ROW is not None:
        seed = of_group(seeds, group, ROW.stochastic)
        if ROW.plane.sixteen:
            rows = loaded_tile(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE)
            if WATCH and not shared:
                note_nonfinite(largest_bits(rows), nonfinite)
            v = sixteen_of_rows(rows)
            write_sixteens(
                v, m0, k0 // 16, M, K // 16, row_codes, row_code_stride, row_scales, row_scale_r, row_scale_c,
                of_group(row_amax, group, not ROW.plane.row_amax),
                of_group(row_amax_out, group, not ROW.plane.row_amax), seed, top, left, width, ROW, EVEN,
            )  # fmt: skip
        else:
            write_blocks(
                tile, m0, k0, M, K, row_codes, row_code_stride, row_scales, row_scale_r,
                row_scale_c, of_group(row_amax, group, ROW.plane.block_rows == 0 and not ROW.given_scale),
                of_group(row_given, group, ROW.given_scale), seed, top, left, width, ROW, WIDE,
            )  # fmt: skip
    if COLUMN is not None:
        seed = of_group(seeds, group, COLUMN.stochastic)
        if COLUMN.plane.sixteen:
            v = loaded_columns(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE)
            if WATCH and not shared and ROW is None:
                note_nonfinite(largest_bits_of_sixteen(v), nonfinite)
            write_sixteens(
                v, k0, m0 // 16, K, M // 16, col_codes, col_code_stride, col_scales, col_scale_r, col_scale_c,
                of_group(col_amax, group, not COLUMN.plane.row_amax),
                of_group(col_amax_out, group, not COLUMN.plane.row_amax), seed, top, left, width, COLUMN, EVEN,
            )  # fmt: skip
        else:
            write_blocks(
                tl.trans(tile), k0, m0, K, M, col_codes, col_code_stride, col_scales,
                col_scale_r, col_scale_c,
                of_group(col_amax, group, COLUMN.plane.block_rows == 0 and not COLUMN.given_scale),
                of_group(col_given, group, COLUMN.given_scale), seed, top, left, width, COLUMN, WIDE,
            )  # fmt: skip


@triton.jit
def of_group(pointer, group, USED: tl.constexpr):
    """A pointer to the number of a group, in an array with one for each; as it is if there is none."""
    if USED:
        return pointer + group
    else:
        return pointer


@triton.jit
def largest_bits(v):
    """The largest magnitude of a tile, in bits (int32). Infinities and NaNs are the largest."""
    return tl.max(bits_of(v) & MAGNITUDE)


@triton.jit
def largest_bits_of_sixteen(v):
    """`largest_bits` of 16 tensors. A maximum of fp32 numbers that keeps NaNs takes their magnitudes on the way."""
    found = tl.abs(v[0])
    for i in tl.static_range(1, 16):
        found = tl.maximum(found, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return largest_bits(found)


@triton.jit
def note_nonfinite(largest, nonfinite):
    """Set a flag if the largest magnitude, in bits, is infinite or NaN. Most programs do not touch it."""
    if largest >= INFINITY:
        tl.atomic_max(nonfinite, 1, sem="relaxed")
