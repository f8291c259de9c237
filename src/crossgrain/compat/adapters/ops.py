"""Helpers of fusible operations that tests and clients call."""

from __future__ import annotations

from typing import Any

from ...tensor import QuantizedTensorStorage
from ..needs_cuda import NeedsCudaError


def is_quantized_tensor(tensor: Any) -> bool:
    return isinstance(tensor, QuantizedTensorStorage)


class GroupedMLPOfCuTe:
    """Stand-in for a grouped MLP in one CUDA kernel: `is_supported` is False, and it cannot be created."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NeedsCudaError("a grouped MLP in one kernel needs CUDA")

    @classmethod
    def is_supported(cls) -> bool:
        return False


def _cudnn_frontend_version_supported() -> bool:
    """Always False: there are no fused kernels of cuDNN here."""
    return False


def _cudnn_frontend_supports_grouped_gemm_srelu() -> bool:
    return _cudnn_frontend_version_supported()
