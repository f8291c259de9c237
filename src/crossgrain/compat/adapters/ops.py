"""What tests and clients ask of the helpers of fusible operations."""

from __future__ import annotations

from typing import Any

from ...tensor import QuantizedTensorStorage
from ..needs_cuda import NeedsCudaError


def is_quantized_tensor(tensor: Any) -> bool:
    return isinstance(tensor, QuantizedTensorStorage)


class GroupedMLPOfCuTe:
    """Grouped layers as one kernel: whoever asks is told that there is none, and none is ever made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NeedsCudaError("a grouped MLP in one kernel needs CUDA")

    @classmethod
    def is_supported(cls) -> bool:
        return False


def _cudnn_frontend_version_supported() -> bool:
    """Whether grouped layers may run cuDNN's fused kernels: there are none here."""
    return False


def _cudnn_frontend_supports_grouped_gemm_srelu() -> bool:
    return _cudnn_frontend_version_supported()
