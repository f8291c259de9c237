"""What tests and clients ask of the helpers of fusible operations."""

from __future__ import annotations

from typing import Any

from ...tensor import QuantizedTensorStorage


def is_quantized_tensor(tensor: Any) -> bool:
    return isinstance(tensor, QuantizedTensorStorage)


def _cudnn_frontend_version_supported() -> bool:
    """Whether grouped layers may run cuDNN's fused kernels: there are none here."""
    return False


def _cudnn_frontend_supports_grouped_gemm_srelu() -> bool:
    return _cudnn_frontend_version_supported()
