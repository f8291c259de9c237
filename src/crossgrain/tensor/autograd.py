"""Autograd functions for quantizing and dequantizing. The gradient passes through both unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..planes import Direction
    from .protocol import TensorQuantizer
    from .tensor import QuantizedTensor


class QuantizeFunction(torch.autograd.Function):
    """Quantize; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: TensorQuantizer, dtype: torch.dtype | None) -> Any:
        return quantizer.make_quantized(tensor.detach(), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class DequantizeFunction(torch.autograd.Function):
    """Dequantize; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype, direction: Direction | None) -> Tensor:
        return tensor._decoded(dtype, direction).detach()  # an identity tensor returns its buffer

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None
