"""Normalisations over the last dimension and their gradients, for modules and fusible operations.

    LayerNorm  y = (x - mean(x)) · rstd · w + b        RMSNorm  y = x · rstd · w

Statistics are computed in fp32 (fp64 for fp64 inputs). With ``zero_centered`` the parameter holds w - 1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .activations import compute_dtype


class Normalized(NamedTuple):
    """The result of a normalisation.

    Attributes:
        y: the output, in the dtype of the input.
        mean: the mean [..., 1], for backward; None in RMSNorm.
        rstd: the reciprocal standard deviation [..., 1], for backward.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Normalized:
    """LayerNorm of x [..., K] with weight and bias [K]."""
    wide = x.to(compute_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * _factor(weight, wide, zero_centered) + bias.to(wide.dtype)
    return Normalized(y.to(x.dtype), mean, rstd)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Normalized:
    """RMSNorm of x [..., K] with a weight [K]."""
    wide = x.to(compute_dtype(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = wide * rstd * _factor(weight, wide, zero_centered)
    return Normalized(y.to(x.dtype), None, rstd)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx in the dtype of x, and dw and db in that of the weight. RMSNorm (``mean`` is None) does not use db.

    ``add`` is another gradient of x, which is added to dx before dx is rounded.
    """
    wide, dy = x.to(rstd.dtype), dy.to(rstd.dtype)
    normalized = (wide if mean is None else wide - mean) * rstd
    d_normalized = dy * _factor(weight, wide, zero_centered)
    dx = d_normalized - normalized * (d_normalized * normalized).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - d_normalized.mean(-1, keepdim=True)
    size = x.shape[-1]
    dw = (dy * normalized).reshape(-1, size).sum(0)
    db = dy.reshape(-1, size).sum(0)
    dx = dx * rstd
    if add is not None:
        dx = dx + add.to(dx.dtype)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Normalized:
    """LayerNorm of x over its last dimensions, which have the shape of ``weight``; RMSNorm without a bias."""
    rows, flat = x.reshape(-1, weight.numel()), weight.reshape(-1)
    if bias is None:
        done = rms_norm(rows, flat, eps, zero_centered)
    else:
        done = layer_norm(rows, flat, bias.reshape(-1), eps, zero_centered)
    return Normalized(done.y.reshape(x.shape), done.mean, done.rstd)


def normalize_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_backward` for weights of any shape: dx has the shape of dy, dw and db have that of the weight."""
    rows = x.reshape(-1, weight.numel())
    more = None if add is None else add.reshape(rows.shape)
    dx, dw, db = norm_backward(dy.reshape(rows.shape), rows, weight.reshape(-1), mean, rstd, zero_centered, more)
    return dx.reshape(dy.shape), dw.reshape(weight.shape), db.reshape(weight.shape)


def _factor(weight: Tensor, like: Tensor, zero_centered: bool) -> Tensor:
    weight = weight.to(like.dtype)
    return weight + 1 if zero_centered else weight


def l2_normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``x / sqrt(sum(x²) + eps)`` along the last dimension; also return the factor [..., 1] for backward."""
    wide = x.to(compute_dtype(x))
    rnorm = (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
    return (wide * rnorm).to(x.dtype), rnorm


def l2_normalized_backward(dy: Tensor, x: Tensor, rnorm: Tensor) -> Tensor:
    """Compute dx of `l2_normalized`."""
    wide, dy = x.to(rnorm.dtype), dy.to(rnorm.dtype)
    inner = (dy * wide).sum(-1, keepdim=True) * rnorm.square()
    return (rnorm * (dy - wide * inner)).to(x.dtype)
