"""The end of a GEMM: scale the product, add what was there before and a bias, and round once to the output.

Nothing is read by the host, so a device never waits. This is the definition; other backends must give the same bits.
In what follows, f32(x) rounds a float64 number to the nearest fp32 number, ties to even, and every other operation is
in fp32 and rounded by itself: no multiplication is fused with the addition after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..global_scale import GlobalScale

_FP32_MAX = torch.finfo(torch.float32).max


def joint_scale(row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor) -> Tensor:
    """The two factors [2] by which a product is multiplied, one after the other, if both its scales are single numbers.

    In float64, with r and c for the two scales (1 for None):

        t = (alpha * r) * c
        [f32(t), 1]                 if abs(t) is at most the largest fp32 number
        [f32(alpha * r), f32(c)]    if it is not, or t is NaN: so that 0 stays 0 under a scale beyond fp32

    Args:
        row_scale: the scale of the first operand.
        column_scale: the scale of the second operand.
        alpha: multiplies the product.
        like: a tensor on the device of the result.
    """
    one = torch.ones(1, dtype=torch.float64, device=like.device)
    first = (one if row_scale is None else row_scale.wide()) * alpha
    second = one if column_scale is None else column_scale.wide()
    together = first * second
    fits = together.abs() <= _FP32_MAX
    both = torch.cat((torch.where(fits, together, first), torch.where(fits, one, second)))
    return both.to(torch.float32)


def epilogue(
    product: Tensor,
    out: Tensor,
    row_scale: GlobalScale | None,
    column_scale: GlobalScale | None,
    alpha: float,
    bias: Tensor | None,
    beta: float | None,
) -> None:
    """Write the result of a GEMM to ``out``.

    In this order:

    1. p = product, times its factors. With r and c for the scales in float64 (1 for None):

           both single                  p = (p * j[0]) * j[1], where j is `joint_scale`
           r for each row, c single     p[i, :] = p[i, :] * f32((r[i] * c) * alpha)
           c for each column, r single  p[:, j] = p[:, j] * f32((c[j] * r) * alpha)
           both vectors                 p[i, j] = (p[i, j] * f32(r[i] * alpha)) * f32(c[j])

    2. If there is a beta: p = fp32(out) * f32(beta) + p, with the multiplication rounded before the addition.
    3. If there is a bias: p[:, j] = p[:, j] + fp32(bias[j]).
    4. out = p, rounded to the nearest number of its dtype, ties to even.

    Args:
        product: the fp32 matrix [rows, columns] of sums. Its memory may be overwritten. It may be ``out`` itself if
            there is no beta.
        out: the matrix to write to: bf16, fp16 or fp32, with any strides.
        row_scale: the scale of the first operand, one number or one for each row; None for none.
        column_scale: the scale of the second operand, one number or one for each column; None for none.
        alpha: multiplies the product.
        bias: one number for each column, of any floating point dtype; None for none.
        beta: multiplies ``out``, which is added; None to overwrite ``out``.
    """
    for factor in _factors(product, row_scale, column_scale, alpha):
        product.mul_(factor)
    if beta is not None:
        product = out.to(torch.float32).mul(beta).add_(product)
    if bias is not None:
        product.add_(bias.to(torch.float32))
    if product is not out:
        out.copy_(product)


def _factors(
    product: Tensor, row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float
) -> list[Tensor]:
    """The fp32 factors of the product, in the order in which they are applied, in shapes that broadcast."""
    row_is_single = row_scale is None or row_scale.is_single
    column_is_single = column_scale is None or column_scale.is_single
    if row_is_single and column_is_single:
        if row_scale is None and column_scale is None and alpha == 1.0:
            return []
        return list(joint_scale(row_scale, column_scale, alpha, product).split(1))
    row = 1.0 if row_scale is None else row_scale.wide()
    column = 1.0 if column_scale is None else column_scale.wide()
    if column_is_single:
        return [_fp32(row * column * alpha).view(-1, 1)]
    if row_is_single:
        return [_fp32(column * row * alpha).view(1, -1)]
    return [_fp32(row * alpha).view(-1, 1), _fp32(column).view(1, -1)]


def _fp32(factor: float | Tensor) -> Tensor:
    assert isinstance(factor, Tensor)
    return factor.to(torch.float32)
