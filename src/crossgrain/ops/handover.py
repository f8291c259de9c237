"""Pass a tensor from one operation to the next, quantized if the next one can use it quantized.

An operation that quantizes its input announces its input quantizer. The operation before it then quantizes the tensor
at once, so that the high-precision tensor can be freed. The bytes are the same as without this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..tensor import QuantizedTensor


def handed_on(tensor: Tensor, quantizer: Quantizer | None) -> Tensor:
    """Return ``tensor`` quantized for the next operation, or unchanged if the next operation could not use that."""
    if quantizer is None or isinstance(tensor, QuantizedTensor) or not _can_be_handed_on(quantizer, tensor):
        return tensor
    made: Tensor = quantizer(tensor.detach())
    return made


def _can_be_handed_on(quantizer: Quantizer, tensor: Tensor) -> bool:
    if quantizer.custom or not (quantizer.rowwise_usage or quantizer.columnwise_usage):
        return False
    if isinstance(quantizer, HybridQuantizer):
        children = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
        # Columns derived from rows cannot be told from others later.
        if quantizer.derives_columns or any(child.custom for child in children):
            return False
    return quantizer.is_quantizable(tensor)


def plain(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor`` in high precision."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize(dtype=dtype).detach()
    return tensor if dtype is None else tensor.to(dtype)
