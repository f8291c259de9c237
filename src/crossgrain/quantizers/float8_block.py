"""FP8 block scaling: 8-bit codes, and an fp32 scale for every 1x128 block or every 128x128 tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, fp8_block_format
from ..formats.dtypes import DType
from ..formats.dtypes import fp8_dtype as as_fp8_dtype
from ..formats.encoding import Encoding, cached_encoding
from ..planes import COLUMNWISE, Direction, matrix_shape
from ..tensor import QuantizedTensor
from ..tensor.fields import DataAndScaleStorage, FP8Storage
from .base import Quantizer


class MissingBlockPlaneError(RuntimeError, AssertionError):
    """A tensor does not have the plane of a direction. Both kinds of errors, because programs catch either."""


class Float8BlockwiseQTensorStorage(FP8Storage, DataAndScaleStorage):
    """The planes of a tensor: rowwise codes [M, K], columnwise codes [K, M], fp32 scales in the layout of GEMMs.

    Examples:
        >>> quantizer = cg.quantizer_for("fp8_block")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.float8_block.Float8BlockwiseQTensorStorage'>
    """

    _missing_plane_error = MissingBlockPlaneError
    _FSDP_BLOCK_LEN = 128  # clients read it

    def _init_fields(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Quantizer | None,
        is_2D_scaled: bool,
        *,
        fake_dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        formats: Mapping[Direction, Format] | None = None,
    ) -> None:
        if formats is None:
            formats = dict.fromkeys(Direction, fp8_block_format(DType.cast(fp8_dtype).element, two_d=is_2D_scaled))
        buffers = (rowwise_data, columnwise_data, rowwise_scale_inv, columnwise_scale_inv)
        self._init_common(formats, quantizer, fake_dtype, shape, buffers)

    def _fsdp_logical_mn(self) -> tuple[int, int]:
        """Rows and columns of the tensor as a matrix; clients call it."""
        return matrix_shape(self._shape)

    @property
    def _is_2D_scaled(self) -> bool:
        return self._has_tiles

    def get_metadata(self) -> dict[str, Any]:
        return {**self._common_metadata(), "fp8_dtype": self._fp8_dtype, "is_2D_scaled": self._is_2D_scaled}

    def _strict_synthesises(self, direction: Direction) -> bool:
        return direction is COLUMNWISE

    def _build_default_quantizer(self) -> Quantizer:
        dim = 2 if self._is_2D_scaled else 1
        return Float8BlockQuantizer(self._fp8_dtype, rowwise=True, columnwise=True, block_scaling_dim=dim)


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """An FP8 tensor with a scale for each block.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "fp8_block")
        >>> isinstance(q, cg.Float8BlockwiseQTensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """


class Float8BlockQuantizer(Quantizer):
    """Quantizes to FP8 with an fp32 scale for each block.

    Args:
        fp8_dtype: FP8 type of the codes.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.
        amax_epsilon: smallest amax that is used to compute a scale.
        force_pow_2_scales: scales are powers of two.
        block_scaling_dim: 1 for blocks of 1x128, 2 for tiles of 128x128.

    Raises:
        ValueError: ``block_scaling_dim`` is not 1 or 2.

    Examples:
        >>> quantizer = cg.Float8BlockQuantizer(cg.DType.kFloat8E4M3, rowwise=True, columnwise=True)
        >>> q = quantizer(torch.ones(128, 128))
        >>> type(q)
        <class 'crossgrain.quantizers.float8_block.Float8BlockwiseQTensor'>
    """

    _tensor_class = Float8BlockwiseQTensor
    _value_fields = ("dtype", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
    block_len = 128

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim must be 1 (1x128) or 2 (128x128), got {block_scaling_dim}")
        self.dtype = as_fp8_dtype(fp8_dtype)
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def _encoding(self, direction: Direction) -> Encoding:
        fmt = fp8_block_format(self.dtype.element, two_d=self.block_scaling_dim == 2)
        return cached_encoding(fmt, power_of_two=self.force_pow_2_scales, epsilon=self.amax_epsilon)

    def is_requantization_safe(self) -> bool:
        return True

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the columnwise codes: the last dimension moves to the front."""
        return (shape[-1], *shape[:-1]) if shape else ()
