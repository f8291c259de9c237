"""Amaxes, for Triton kernels: of a tensor, of each group of rows, or of each row or column."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import bits_of, without_nan
from .sixteens import largest, rotated, sixteen_of_rows
from .tiles import group_of_tile, loaded_columns, loaded_tile


@triton.jit
def amax_kernel(
    x, x_m, x_k, M, K, groups, table, out,
    OF: tl.constexpr, ROTATION: tl.constexpr, ROWWISE: tl.constexpr, COMPILED: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise the numbers of ``out`` (int32, the bits of fp32) to the largest magnitudes of the tile of this program.

    The bits of magnitudes compare as integers, so the result does not depend on the order of programs.

    Args:
        OF: "tensor", "row" or "column": of what there is one amax each.
        ROTATION: signs of a rotation that is applied first, along the rows if ``ROWWISE``; -1 for none.
    """
    across = tl.cdiv(K, BK)
    k0 = tl.program_id(0) % across * BK
    down = tl.program_id(0) // across
    group = 0
    if GROUPED:
        group, m0, _, first, M = group_of_tile(groups, table, down)
        x += first * x_m
        if OF == "row":
            out += first
        elif OF == "column":
            out += group * K
        else:
            out += group
    else:
        m0 = down * BM
    if ROTATION >= 0:
        if ROWWISE:
            v = sixteen_of_rows(loaded_tile(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE))
        else:
            v = loaded_columns(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE)
        a = largest(rotated(v, ROTATION, COMPILED), COMPILED)
    else:
        a = tl.abs(loaded_tile(x, x_m, x_k, m0, k0, M, K, BM, BK, WIDE))
    if OF == "tensor":
        found = without_nan(tl.max(tl.max(a, axis=1), axis=0))
        tl.atomic_max(out, bits_of(found), sem="relaxed")
    elif OF == "row":
        m = m0 + tl.arange(0, BM)
        found = without_nan(tl.max(a, axis=1))
        tl.atomic_max(out + m, bits_of(found), mask=m < M, sem="relaxed")
    else:
        k = k0 + tl.arange(0, BK)
        found = without_nan(tl.max(a, axis=0))
        tl.atomic_max(out + k, bits_of(found), mask=k < K, sem="relaxed")
