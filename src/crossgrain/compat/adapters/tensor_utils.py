"""Helpers for quantized tensors and quantizers that clients call."""

from __future__ import annotations

from typing import Any

import torch

from ...quantizers.base import Quantizer
from ...tensor import QuantizedTensor, QuantizedTensorStorage


def is_custom(x: Quantizer | QuantizedTensorStorage | None = None) -> bool:
    """Whether a quantizer, or the quantizer of a tensor, is one that a user has written."""
    if x is None or not isinstance(x, Quantizer | QuantizedTensorStorage):
        return False
    quantizer: Any = x if isinstance(x, Quantizer) else x._quantizer
    return bool(getattr(x, "custom", False) or getattr(quantizer, "custom", False))


def clear_columnwise_cache(tensor: QuantizedTensorStorage) -> None:
    """Free the columnwise data if it can be made again from the rows; otherwise do nothing."""
    usages = tensor.get_usages()
    if usages["rowwise"] and usages["columnwise"] and tensor._derivable_formats():
        tensor.update_usage(columnwise_usage=False)


class _IdentityFunc(torch.autograd.Function):
    """A new tensor with the same buffers, perhaps of another nominal dtype. Gradients pass through unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, init_kwargs: dict[str, Any] | None = None) -> Any:
        return tensor._rewrap(**(init_kwargs or {}))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
