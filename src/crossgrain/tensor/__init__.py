"""Quantized tensors: two planes, as a storage and as a torch.Tensor, and what operations do with them."""

from .holder import PlaneBuffers
from .saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from .storage import QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = [
    "PlaneBuffers",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]
