"""The two-plane quantized tensor, its lifecycle and its operations."""

from .broadcast import teach_torch
from .holder import PlaneBuffers
from .saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from .storage import QuantizedTensorStorage
from .tensor import QuantizedTensor

teach_torch()

__all__ = [
    "PlaneBuffers",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]
