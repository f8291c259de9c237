"""FP8 with current scaling by crossgrain's reference kernels, which are plain torch code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats.dtypes import DType, TE_DType, TE_DType_To_Torch
from ...kernels.choice import using_backend
from ...planes import ROWWISE
from ...quantizers.float8 import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage

__all__ = ["CurrentScalingQuantizerRef", "CurrentScalingTensorRef"]


class CurrentScalingTensorRef(Float8TensorStorage):
    """An FP8 tensor: ``data`` [M, K] and ``data_t`` [K, M], and ``scale`` and ``scale_t`` to multiply them by."""

    @property
    def data(self) -> Tensor | None:
        return None if self._data is None else self._data.view(self._torch_dtype())

    @property
    def data_t(self) -> Tensor | None:
        if self._transpose is not None:
            return self._transpose.view(self._torch_dtype())
        rows = self.plane(ROWWISE)
        return None if rows is None else rows.data.flatten(0, -2).t().contiguous().view(self._torch_dtype())

    @property
    def scale(self) -> Tensor | None:
        return self._scale_inv

    @property
    def scale_t(self) -> Tensor | None:
        return self._scale_inv

    @property
    def original_shape(self) -> torch.Size:
        return self.shape

    def _torch_dtype(self) -> torch.dtype:
        return TE_DType_To_Torch[self._fp8_dtype]


class _ReferenceTensor(Float8Tensor, CurrentScalingTensorRef):
    """`CurrentScalingTensorRef` as a torch.Tensor."""


class CurrentScalingQuantizerRef(Float8CurrentScalingQuantizer):
    """Quantizes with the reference kernels; the results are storages, not torch tensors."""

    _tensor_class = _ReferenceTensor
    custom = True

    def __init__(
        self,
        dtype: torch.dtype | DType,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
    ) -> None:
        super().__init__(
            TE_DType[dtype] if isinstance(dtype, torch.dtype) else dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            force_pow_2_scales=pow_2_scales,
            amax_epsilon=eps,
        )
        self.internal = True

    def quantize_impl(self, tensor: Tensor) -> Any:
        with using_backend("reference"):
            return super().quantize_impl(tensor)
