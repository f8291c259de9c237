"""Load tiles of a matrix, and find the group of rows that a program works on."""

from __future__ import annotations

import triton
import triton.language as tl

TABLE_COLUMNS = tl.constexpr(12)
"""Numbers for each group: first row, rows, and for both planes: codes, scales, stride of codes, strides of scales."""


@triton.jit
def group_of_tile(groups, table, down):
    """What the tables say about the tile ``down``: its group, its first row in the group, the group's line, the group's
    first row in the matrix, and its number of rows."""
    group = tl.load(groups + 2 * down)
    line = table + group * TABLE_COLUMNS
    return group, tl.load(groups + 2 * down + 1), line, tl.load(line), tl.load(line + 1).to(tl.int32)


@triton.jit
def loaded_tile(x, x_m, x_k, m0, k0, M, K, BM: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
    """The tile [BM, BK] of x [M, K] at (m0, k0) as fp32, with 0 outside of x."""
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    inside = (m0 + m < M)[:, None] & (k0 + k < K)[None, :]
    return tl.load(x + tile_start(m0, k0, x_m, x_k) + near(m, k, x_m, x_k, WIDE), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def loaded_columns(x, x_m, x_k, m0, k0, M, K, BM: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
    """The same tile as 16 tensors [BK, BM / 16]: number i of all blocks of 16 down the columns.

    Each is loaded by itself. Rows that are far apart are then in one thread, without an exchange between threads.
    """
    g = tl.arange(0, BM // 16)
    k = tl.arange(0, BK)
    inside = (m0 + 16 * g < M)[:, None] & (k0 + k < K)[None, :]
    start = x + tile_start(m0, k0, x_m, x_k)
    out = ()
    for i in tl.static_range(16):
        rows = tl.load(start + near(16 * g + i, k, x_m, x_k, WIDE), mask=inside, other=0.0)
        out = out + (tl.trans(rows.to(tl.float32)),)
    return out


@triton.jit
def tile_start(m0, k0, x_m, x_k):
    return m0.to(tl.int64) * x_m + k0.to(tl.int64) * x_k


@triton.jit
def near(m, k, x_m, x_k, WIDE: tl.constexpr):
    """Offsets inside of a tile; they need 64 bits if a tile reaches over 2**31 numbers."""
    if WIDE:
        m, k = m.to(tl.int64), k.to(tl.int64)
    return m[:, None] * x_m + k[None, :] * x_k


@triton.jit
def aligned(offset, ALIGNED: tl.constexpr):
    """An offset or stride that was loaded. Triton does not see that it is a multiple of 16, so it is told."""
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset
