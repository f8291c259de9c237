"""LayerNorm, RMSNorm and L2 normalization as operations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...gemm.norms import l2_normalized, l2_normalized_backward, layer_norm, norm_backward, rms_norm
from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, activation_dtype
from .parameters import resolved_device


class _Norm(Computation):
    """Base class of norms over the last dimensions.

    Args:
        normalized_shape: shape of the last dimensions of the input.
        eps: added to the variance.
        device: device of the parameters.
        dtype: dtype of the parameters.
        zero_centered_gamma: the parameter is the difference of the weight from 1.
        sm_margin: accepted and ignored.
    """

    _has_bias: bool

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
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = sm_margin  # of GPUs
        factory: Any = {"dtype": dtype, "device": resolved_device(device)}
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        if self._has_bias:
            self.bias = nn.Parameter(torch.empty(shape, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self._has_bias:
            nn.init.zeros_(self.bias)

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            for name, parameter in list(self.named_parameters()):
                self.register_parameter(
                    name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
                )
            self.reset_parameters()

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        if tuple(input_.shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise ValueError(
                f"{self.layer}: the last dimensions of the input must be {list(self.normalized_shape)}, got an input "
                f"of shape {list(input_.shape)}"
            )
        x = plain(input_, activation_dtype(input_))
        rows = x.reshape(-1, math.prod(self.normalized_shape))
        weight = self.weight.detach().reshape(-1)
        if self._has_bias:
            done = layer_norm(rows, weight, self.bias.detach().reshape(-1), self.eps, self.zero_centered_gamma)
        else:
            done = rms_norm(rows, weight, self.eps, self.zero_centered_gamma)
        if ctx.requires_grad:
            ctx.save_for_backward(rows, done.mean, done.rstd)
            ctx.shape, ctx.dtype = input_.shape, input_.dtype
        return done.y.reshape(x.shape)

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return self.norm_backward(ctx, grad_output)

    def norm_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return dx in high precision, and the gradients of the parameters."""
        rows, mean, rstd = ctx.saved_tensors
        dy = plain(grad_output).reshape(rows.shape)
        weight = self.weight.detach().reshape(-1)
        dx, *grads = norm_backward(dy, rows, weight, mean, rstd, self.zero_centered_gamma)
        return dx.reshape(ctx.shape).to(ctx.dtype), [
            grad.reshape(self.normalized_shape) for grad in (grads if self._has_bias else grads[:1])
        ]

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """``y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias``"""

    _has_bias = True


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x²) + eps) · weight``"""

    _has_bias = False


class L2Normalization(Computation):
    """``y = x / sqrt(sum(x²) + eps)`` along the last dimension."""

    def __init__(self, eps: float = 1e-6) -> None:
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
