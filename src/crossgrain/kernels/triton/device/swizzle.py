"""Scales in the swizzled layout of GEMMs, see `kernels.layout`, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swizzle_kernel(scales, scale_r, scale_c, out, R, C, TILES: tl.constexpr):
    """Write ``TILES`` neighbouring tiles of 128x4 scales; what is outside of [R, C] is 0."""
    tiles = tl.cdiv(C, 4)
    across = tl.cdiv(tiles, TILES)
    down, first = tl.program_id(0) // across, tl.program_id(0) % across * TILES
    i = tl.arange(0, 128)
    j = tl.arange(0, 4 * TILES)
    r, c = down * 128 + i, first * 4 + j
    at = scales + r.to(tl.int64)[:, None] * scale_r + c.to(tl.int64)[None, :] * scale_c
    found = tl.load(at, mask=(r < R)[:, None] & (c < C)[None, :], other=0)
    place = (i % 32 * 16 + i // 32 * 4)[:, None] + (j // 4 * 512 + j % 4)[None, :]
    to = out + (down.to(tl.int64) * tiles + first) * 512
    tl.store(to + place, found, mask=(c // 4 < tiles)[None, :])
