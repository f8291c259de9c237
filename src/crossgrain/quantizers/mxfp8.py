"""MXFP8: 8-bit codes, and a power-of-two scale for every 32 numbers along a row or column, or every 32x32 tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, mxfp8_format
from ..formats.dtypes import DType
from ..formats.dtypes import fp8_dtype as as_fp8_dtype
from ..formats.encoding import Encoding, cached_encoding
from ..planes import Direction
from ..tensor import QuantizedTensor
from ..tensor.fields import DataAndScaleStorage, FP8Storage, refuse_swizzled
from .base import Quantizer

MXFP8_BLOCK_SCALING_SIZE = 32


class MXFP8TensorStorage(FP8Storage, DataAndScaleStorage):
    """The planes of an MXFP8 tensor: codes [M, K] in both directions, and E8M0 scales padded to 128x4.

    Examples:
        >>> quantizer = cg.quantizer_for("mxfp8")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.mxfp8.MXFP8TensorStorage'>
    """

    _with_gemm_swizzled_scales = False

    def _init_fields(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Quantizer | None,
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        formats: Mapping[Direction, Format] | None = None,
    ) -> None:
        refuse_swizzled(with_gemm_swizzled_scales)
        if formats is None:
            two_d = isinstance(quantizer, MXFP8Quantizer) and quantizer.with_2d_quantization
            formats = dict.fromkeys(Direction, mxfp8_format(DType.cast(fp8_dtype).element, two_d=two_d))
        buffers = (rowwise_data, columnwise_data, rowwise_scale_inv, columnwise_scale_inv)
        self._init_common(formats, quantizer, fake_dtype, shape, buffers)

    def get_metadata(self) -> dict[str, Any]:
        return {**self._common_metadata(), "fp8_dtype": self._fp8_dtype, "with_gemm_swizzled_scales": False}

    def _build_default_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(self._fp8_dtype, with_2d_quantization=self._has_tiles)


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """An MXFP8 tensor: ``MXFP8Tensor(shape, dtype, rowwise_data=..., ..., fp8_dtype=..., quantizer=...)``.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "mxfp8")
        >>> isinstance(q, cg.MXFP8Tensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """


class MXFP8Quantizer(Quantizer):
    """Quantizes to MXFP8.

    Args:
        fp8_dtype: FP8 type of the codes.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.
        with_2d_quantization: one scale per 32x32 tile, so that both directions hold the same numbers (for weights).

    Examples:
        >>> quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)
        >>> q = quantizer(torch.full((32, 32), 1.05))
        >>> q.dequantize()[0, :3]
        tensor([1., 1., 1.])
    """

    _tensor_class = MXFP8Tensor
    _value_fields = ("dtype", "with_2d_quantization")

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = as_fp8_dtype(fp8_dtype)
        self.with_2d_quantization = with_2d_quantization

    def _encoding(self, direction: Direction) -> Encoding:
        return cached_encoding(mxfp8_format(self.dtype.element, two_d=self.with_2d_quantization))

    def is_requantization_safe(self) -> bool:
        return True

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the columnwise codes, which are not transposed."""
        return tuple(rowwise_data_shape)

    def create_tensor_from_data(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: DType = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """Make a tensor with a rowwise plane from existing codes and scales.

        Args:
            data: the codes.
            scale_inv: the scales, in the layout of `MXFP8TensorStorage`.
            fake_dtype: nominal dtype: what `dequantize` returns.
            fp8_dtype: FP8 type of the codes.
        """
        return MXFP8Tensor(
            data.shape,
            fake_dtype,
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=fp8_dtype,
            quantizer=self,
        )
