"""Sixteen numbers of a block as sixteen tensors, so that what mixes them is arithmetic of registers.

Rotations, sums in a given order and packing need all numbers of a block in one thread. In a tuple of 16 tensors they
are, whatever layout Triton chooses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import larger, rounded_to_bf16, without_nan


@triton.jit
def halves(v):
    """The even and the odd elements along the last dimension: [..., 2 n] -> two of [..., n]."""
    return tl.split(tl.reshape(v, (v.shape[0], v.shape[1] // 2, 2)))


@triton.jit
def sixteen_of_rows(v):
    """[R, 16 B] -> 16 tensors [R, B]: number i of every block of 16 along a row."""
    a, b = halves(v)
    a0, a1 = halves(a)
    b0, b1 = halves(b)
    a00, a01 = halves(a0)
    a10, a11 = halves(a1)
    b00, b01 = halves(b0)
    b10, b11 = halves(b1)
    # The first split took the lowest bit of the index, the last one takes the highest.
    v0, v8 = halves(a00)
    v4, v12 = halves(a01)
    v2, v10 = halves(a10)
    v6, v14 = halves(a11)
    v1, v9 = halves(b00)
    v5, v13 = halves(b01)
    v3, v11 = halves(b10)
    v7, v15 = halves(b11)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


@triton.jit
def butterfly(v, D: tl.constexpr):
    """Sums and differences of 16 tensors at distance D."""
    out = ()
    for i in tl.static_range(16):
        if (i // D) % 2 == 0:
            out = out + (v[i] + v[i + D],)
        else:
            out = out + (v[i - D] - v[i],)
    return out


@triton.jit
def negated(x):
    """``-x``, which Triton computes as 0 - x, so that -0 would be lost."""
    return x * -1.0


@triton.jit
def rotated(v, SIGNS: tl.constexpr, COMPILED: tl.constexpr):
    """16 tensors rotated as `reference.hadamard.rotate` does, and rounded to bf16."""
    out = ()
    for i in tl.static_range(16):
        out = out + (negated(v[i]) if (SIGNS >> i) & 1 else v[i],)
    out = butterfly(butterfly(butterfly(butterfly(out, 1), 2), 4), 8)
    rounded = ()
    for i in tl.static_range(16):
        rounded = rounded + (rounded_to_bf16(out[i] * 0.25, COMPILED),)
    return rounded


@triton.jit
def unrotated(v, SIGNS: tl.constexpr):
    """16 tensors with their rotation undone, up to fp32 rounding."""
    v = butterfly(butterfly(butterfly(butterfly(v, 1), 2), 4), 8)
    out = ()
    for i in tl.static_range(16):
        number = v[i] * 0.25
        out = out + (negated(number) if (SIGNS >> i) & 1 else number,)
    return out


@triton.jit
def largest(v, COMPILED: tl.constexpr):
    """The largest magnitude of 16 tensors, without NaNs."""
    a = tl.abs(v[0])
    for i in tl.static_range(1, 16):
        a = larger(a, tl.abs(v[i]), COMPILED)
    return without_nan(a)


@triton.jit
def rows_of_sixteen(v):
    """16 tensors [R, B] -> [R, 16 B]: the inverse of `sixteen_of_rows`."""
    a = joined(joined(joined(v[0], v[8]), joined(v[4], v[12])), joined(joined(v[2], v[10]), joined(v[6], v[14])))
    b = joined(joined(joined(v[1], v[9]), joined(v[5], v[13])), joined(joined(v[3], v[11]), joined(v[7], v[15])))
    return joined(a, b)


@triton.jit
def joined(even, odd):
    """The inverse of `halves`."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1] * 2))


@triton.jit
def whole_tile(v, reduce_max: tl.constexpr):
    """One number for each 16 rows of [R, B], repeated for all of them: their largest, or their sum by halves."""
    R: tl.constexpr = v.shape[0]
    B: tl.constexpr = v.shape[1]
    tiles = tl.reshape(v, (R // 16, 16, B))
    if reduce_max:
        one = tl.max(tiles, axis=1)
    else:
        eight = tl.permute(tl.reshape(v, (R // 16, 2, 8, B)), (0, 2, 3, 1))
        low, high = tl.split(eight)
        four = tl.permute(tl.reshape(low + high, (R // 16, 2, 4, B)), (0, 2, 3, 1))
        low, high = tl.split(four)
        two = tl.permute(tl.reshape(low + high, (R // 16, 2, 2, B)), (0, 2, 3, 1))
        low, high = tl.split(two)
        pair = tl.permute(tl.reshape(low + high, (R // 16, 2, B)), (0, 2, 1))
        low, high = tl.split(pair)
        one = low + high
    return tl.reshape(tl.broadcast_to(one[:, None, :], (R // 16, 16, B)), (R, B))
