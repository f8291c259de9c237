"""The end of a GEMM in one pass, and the joint scale of its operands: `reference.epilogue`, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .bits import FP32_MAX
from .decode import as_dtype


@triton.jit
def double_of(bits):
    """A float64 number from its bits. Triton would pass a Python number as fp32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def joint_factors(first, second):
    """The two factors of a product with single scales, in float64: see `reference.epilogue.joint_scale`."""
    together = first * second
    fits = tl.abs(together) <= FP32_MAX
    one = tl.full((), 1.0, tl.float64)
    return tl.where(fits, together, first).to(tl.float32), tl.where(fits, one, second).to(tl.float32)


@triton.jit
def loaded_scale(values, factor_bits, KIND: tl.constexpr, place, inside):
    """A scale in float64: one number, one for each place, or 1."""
    if KIND == "none":
        return tl.full((), 1.0, tl.float64)
    elif KIND == "single":
        return tl.load(values).to(tl.float64) * double_of(factor_bits)
    else:
        return tl.load(values + place, mask=inside, other=0.0).to(tl.float64) * double_of(factor_bits)


@triton.jit(do_not_specialize=["row_factor", "column_factor", "alpha"])
def joint_scale_kernel(row, row_factor, column, column_factor, alpha, out, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Write the two factors [2] of a product with single scales."""
    first = loaded_scale(row, row_factor, ROW, 0, True) * double_of(alpha)
    second = loaded_scale(column, column_factor, COLUMN, 0, True)
    one_after, the_other = joint_factors(first, second)
    tl.store(out, one_after)
    tl.store(out + 1, the_other)


@triton.jit(do_not_specialize=["row_factor", "column_factor", "alpha", "beta"])
def epilogue_kernel(
    product, product_m, product_n, out, out_m, out_n, M, N,
    row, row_factor, column, column_factor, alpha, beta, bias,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr, BIAS: tl.constexpr,
    COMPILED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the tile of this program of the result of a GEMM.

    Args:
        row, column: the scales of the operands, and ``row_factor`` and ``column_factor``, by which they are multiplied.
        alpha, row_factor, column_factor: the bits of float64 numbers.
        beta: the bits of an fp32 number.
        ROW, COLUMN: "none", "single" or "each": what scales there are.
        SCALED: whether there is anything to multiply with.
        ADDS: whether ``out``, times ``beta``, is added.
    """
    across = tl.cdiv(N, BN)
    m0, n0 = tl.program_id(0) // across * BM, tl.program_id(0) % across * BN
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    if WIDE:
        m, n = m.to(tl.int64), n.to(tl.int64)
    p = tl.load(product + m[:, None] * product_m + n[None, :] * product_n, mask=inside, other=0.0)
    if SCALED:
        r = loaded_scale(row, row_factor, ROW, m, m < M)
        c = loaded_scale(column, column_factor, COLUMN, n, n < N)
        a = double_of(alpha)
        if ROW == "each" and COLUMN == "each":
            p = (p * (r * a).to(tl.float32)[:, None]) * c.to(tl.float32)[None, :]
        elif ROW == "each":
            p = p * ((r * c) * a).to(tl.float32)[:, None]
        elif COLUMN == "each":
            p = p * ((c * r) * a).to(tl.float32)[None, :]
        else:
            first, second = joint_factors(r * a, c)
            p = (p * first) * second
    to = out + m[:, None] * out_m + n[None, :] * out_n
    if ADDS:
        p = tl.load(to, mask=inside, other=0.0).to(tl.float32) * beta.to(tl.int32).to(tl.float32, bitcast=True) + p
    if BIAS:
        p = p + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(to, as_dtype(p, out.dtype.element_ty, COMPILED), mask=inside)
