"""LayerNorm, RMSNorm and L2 normalization as operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...gemm.norms import l2_normalized, l2_normalized_backward, normalize, normalize_backward
from ...nn.norm import NormParameters
from ...nn.options import parameter_options
from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, activation_dtype


class _Norm(NormParameters, Computation):
    """Base class of norms over the last dimensions.

    Args:
        normalized_shape: shape of the last dimensions of the input.
        eps: added to the variance.
        device: device of the parameters.
        dtype: dtype of the parameters.
        zero_centered_gamma: the parameter is the difference of the weight from 1.
        sm_margin: accepted and ignored.
    """

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        self.sm_margin = sm_margin  # of GPUs
        self._make_parameters(normalized_shape, eps, zero_centered_gamma, parameter_options(dtype, device))

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        self._initialise()

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self._materialise("cpu")
            self.reset_parameters()

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        if tuple(input_.shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise ValueError(
                f"{self.layer}: the last dimensions of the input must be {list(self.normalized_shape)}, got an input "
                f"of shape {list(input_.shape)}"
            )
        x = plain(input_, activation_dtype(input_))
        bias = self.bias.detach() if self._has_bias else None  # type: ignore[union-attr]
        done = normalize(x, self.weight.detach(), bias, self.eps, self.zero_centered_gamma)
        if ctx.requires_grad:
            ctx.save_for_backward(x, done.mean, done.rstd)
            ctx.shape, ctx.dtype = input_.shape, input_.dtype
        return done.y

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return self.norm_backward(ctx, grad_output)

    def norm_backward(
        self, ctx: OperationContext, grad_output: Tensor, add: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return dx in high precision, and the gradients of the parameters. ``add`` is added to dx before rounding."""
        x, mean, rstd = ctx.saved_tensors
        weight = self.weight.detach()
        dx, dw, db = normalize_backward(plain(grad_output), x, weight, mean, rstd, self.zero_centered_gamma, add)
        return dx.reshape(ctx.shape).to(ctx.dtype), [dw, db] if self._has_bias else [dw]


class LayerNorm(_Norm):
    """``y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias``

    Examples:
        >>> cg.ops.LayerNorm(4)(torch.randn(2, 4)).shape
        torch.Size([2, 4])
    """

    _has_bias = True


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x²) + eps) · weight``

    Examples:
        >>> cg.ops.RMSNorm(4)(torch.randn(2, 4)).shape
        torch.Size([2, 4])
    """


class L2Normalization(Computation):
    """``y = x / sqrt(sum(x²) + eps)`` along the last dimension.

    Args:
        eps: added to the sum.
        seq_length: accepted; it is for warming up GPU kernels.
        micro_batch_size: accepted; it is for warming up GPU kernels.

    Examples:
        >>> cg.ops.L2Normalization()(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    def __init__(self, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None) -> None:
        super().__init__()
        self.eps = eps

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        x = plain(input_)
        y, rnorm = l2_normalized(x, self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(x, rnorm)
        return y

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        x, rnorm = ctx.saved_tensors
        return l2_normalized_backward(plain(grad_output), x, rnorm), []
