"""NVFP4: 4-bit codes, an E4M3 scale for every 16 numbers along a row or column, and one fp32 amax per tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..formats import DEFAULT_SIGN_MASK, Format, nvfp4_format
from ..formats.dtypes import DType
from ..formats.encoding import Encoding, RandomSource, cached_encoding, check_random_source
from ..kernels.reference.hadamard import rotation_matrix
from ..planes import COLUMNWISE, ROWWISE, Direction, matrix_shape
from ..runtime.strict import strict_error
from ..tensor import QuantizedTensor
from ..tensor.fields import DataScaleAndAmaxStorage, refuse_swizzled
from .base import Quantizer

NVFP4_BLOCK_SCALING_SIZE = 16


class NVFP4TensorStorage(DataScaleAndAmaxStorage):
    """The planes of an NVFP4 tensor, with two codes per byte, the low half first: [M, K/2] and columnwise [K, M/2].

    Examples:
        >>> quantizer = cg.quantizer_for("nvfp4")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.nvfp4.NVFP4TensorStorage'>
    """

    _strict_decodes_rowwise_only = True
    _with_gemm_swizzled_scales = False

    def _init_fields(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None,
        amax_columnwise: Tensor | None,
        fp4_dtype: DType,
        quantizer: Quantizer | None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        *,
        fake_dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        formats: Mapping[Direction, Format] | None = None,
    ) -> None:
        refuse_swizzled(with_gemm_swizzled_scales)
        _check_fp4(fp4_dtype)
        if formats is None and isinstance(quantizer, NVFP4Quantizer):
            formats = {direction: quantizer.encoding(direction).format for direction in Direction}
        if formats is None:
            fmt = nvfp4_format(row_scaled=row_scaled_nvfp4, scale_bound=nvfp4_e4m3_max)
            formats = dict.fromkeys(Direction, fmt)
        buffers = (
            rowwise_data,
            columnwise_data,
            rowwise_scale_inv,
            columnwise_scale_inv,
            amax_rowwise,
            amax_columnwise,
        )
        self._init_common(formats, quantizer, fake_dtype, shape, buffers)

    @property
    def _fp4_dtype(self) -> DType:
        return DType.kFloat4E2M1

    @property
    def _row_scaled_nvfp4(self) -> bool:
        return self._formats[ROWWISE].global_amax == "row"

    @property
    def _nvfp4_e4m3_max(self) -> int:
        return self._formats[ROWWISE].scale_bound

    @property
    def _nvfp4_use_4over6(self) -> bool:
        if isinstance(self._quantizer, NVFP4Quantizer):
            return self._quantizer.nvfp4_use_4over6
        return self._nvfp4_e4m3_max != 448

    def get_metadata(self) -> dict[str, Any]:
        return {
            **self._common_metadata(),
            "fp4_dtype": self._fp4_dtype,
            "with_gemm_swizzled_scales": False,
            "row_scaled_nvfp4": self._row_scaled_nvfp4,
            "nvfp4_use_4over6": self._nvfp4_use_4over6,
            "nvfp4_e4m3_max": self._nvfp4_e4m3_max,
        }

    def _strict_synthesises(self, direction: Direction) -> bool:
        return direction is COLUMNWISE

    def _build_default_quantizer(self) -> Quantizer:
        column = self._formats[COLUMNWISE]
        return NVFP4Quantizer(
            with_rht=column.rotation is not None,
            with_post_rht_amax=column.rotation is not None,
            with_2d_quantization=self._has_tiles,
            row_scaled_nvfp4=self._row_scaled_nvfp4,
            nvfp4_use_4over6=self._nvfp4_use_4over6,
            nvfp4_e4m3_max=self._nvfp4_e4m3_max,
            with_random_sign_mask=column.rotation != 0,
        )


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """An NVFP4 tensor.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "nvfp4")
        >>> isinstance(q, cg.NVFP4Tensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """


class NVFP4Quantizer(Quantizer):
    """Quantizes to NVFP4.

    Args:
        fp4_dtype: must be kFloat4E2M1.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.
        with_amax_reduction: use the largest amax over the ranks of ``amax_reduction_group``.
        amax_reduction_group: the process group; None for all ranks.
        with_rht: rotate columnwise data by a Hadamard transform of 16 numbers with fixed signs before quantizing it.
        with_post_rht_amax: take the columnwise amax after the rotation. Must be True with ``with_rht``.
        with_2d_quantization: one scale per 16x16 tile, so that both directions hold the same numbers (for weights).
        stochastic_rounding: round codes stochastically, without bias (for gradients).
        row_scaled_nvfp4: an amax for every row instead of one for the tensor.
        nvfp4_use_4over6: each block uses the better of two scales, which map its largest number to 4 or to 6.
        nvfp4_e4m3_max: upper bound of the scale that maps to 6, with ``nvfp4_use_4over6``: 256 leaves room for the
            scale that maps to 4, which is 1.5 times as large; 448 is the largest E4M3 number.
        nvfp4_4over6_err_mode: which of the two scales is better: "MAE" compares mean absolute errors, "MSE" mean
            squared errors.
        with_random_sign_mask: the rotation has fixed random signs; False for none.
        random_source: the random bits of stochastic rounding: "hash", or "philox" as on a GPU (slower here).

    Raises:
        ValueError: an option has a wrong value, or two options cannot be combined.

    Examples:
        >>> quantizer = cg.NVFP4Quantizer()
        >>> q = quantizer(torch.arange(512.0).view(16, 32))
        >>> q.dequantize()[0, :4]
        tensor([0.0000, 1.2357, 2.4714, 2.4714])
    """

    _tensor_class = NVFP4Tensor
    _value_fields = (
        "with_amax_reduction",
        "with_rht",
        "with_post_rht_amax",
        "with_2d_quantization",
        "stochastic_rounding",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode",
        "rht_matrix_random_sign_mask_t",
        "random_source",
    )
    random_source: RandomSource = "hash"  # of quantizers that were pickled before there was a choice

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE",
        with_random_sign_mask: bool = True,
        random_source: RandomSource = "hash",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        _check_fp4(fp4_dtype)
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"nvfp4_e4m3_max must be 448 or 256, got {nvfp4_e4m3_max}")
        if nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got {nvfp4_4over6_err_mode!r}")
        self.dtype = DType.kFloat4E2M1
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.rht_matrix_random_sign_mask_t = DEFAULT_SIGN_MASK if with_random_sign_mask else 0
        self.random_source = random_source
        self._refuse_conflicts()

    def _refuse_conflicts(self) -> None:
        conflicts = {
            "row_scaled_nvfp4": ("with_rht", "with_2d_quantization", "stochastic_rounding", "with_amax_reduction"),
            "nvfp4_use_4over6": ("with_rht", "stochastic_rounding"),
            "with_2d_quantization": ("with_rht",),
        }
        for option, others in conflicts.items():
            for other in others:
                if getattr(self, option) and getattr(self, other):
                    raise ValueError(f"NVFP4Quantizer: {option} and {other} cannot be combined")
        check_random_source(self.random_source, self.stochastic_rounding)

    @property
    def rht_matrix(self) -> Tensor:
        """The 16x16 matrix of the rotation."""
        return rotation_matrix(self.rht_matrix_random_sign_mask_t)

    def _encoding(self, direction: Direction) -> Encoding:
        rotation = None
        if direction is COLUMNWISE and self.with_rht:
            rotation = self.rht_matrix_random_sign_mask_t
        fmt = nvfp4_format(
            two_d=self.with_2d_quantization,
            row_scaled=self.row_scaled_nvfp4,
            scale_bound=self.nvfp4_e4m3_max,
            rotation=rotation,
        )
        select = self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None
        return cached_encoding(
            fmt, stochastic=self.stochastic_rounding, four_over_six=select, random=self.random_source
        )

    def _check_shape(self, shape: Sequence[int], directions: Sequence[Direction]) -> None:
        if COLUMNWISE in directions and self.with_rht and not self.with_post_rht_amax:
            raise ValueError(
                "NVFP4Quantizer: with_rht=True needs with_post_rht_amax=True, because the scales of the columnwise "
                "plane are computed from the amax after the rotation"
            )
        super()._check_shape(shape, directions)

    def _refuse_in_strict_mode(self, tensor: Tensor, directions: Sequence[Direction]) -> None:
        if COLUMNWISE not in directions:
            return
        rows, cols = matrix_shape(tensor.shape)
        if self.with_rht and tensor.dtype != torch.bfloat16:
            raise strict_error(
                "dtype of rotated NVFP4", f"the Hadamard rotation needs a bfloat16 tensor, got {tensor.dtype}"
            )
        if self.row_scaled_nvfp4:
            if ROWWISE not in directions:
                raise strict_error("columns of row-scaled NVFP4", "row-scaled NVFP4 needs rowwise usage")
            if tensor.dtype != torch.bfloat16 or rows % 32 or cols % 32 or self.nvfp4_use_4over6:
                raise strict_error(
                    "columns of row-scaled NVFP4",
                    "columnwise row-scaled NVFP4 needs a bfloat16 tensor whose dimensions are multiples "
                    f"of 32, and no 4-over-6; got {tensor.dtype} of shape {list(tensor.shape)} and "
                    f"nvfp4_use_4over6={self.nvfp4_use_4over6}",
                )

    def is_quantizable(self, inp: Tensor) -> bool:
        return not self.row_scaled_nvfp4 and super().is_quantizable(inp)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    @staticmethod
    def get_columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the columnwise codes, which always have two dimensions."""
        return (shape[-1], math.prod(shape[:-1])) if shape else ()

    @staticmethod
    def convert_shape_for_fp4(shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the buffer of codes: two codes per byte."""
        return (*shape[:-1], shape[-1] // 2)


def _check_fp4(dtype: DType) -> None:
    if DType.cast(dtype) is not DType.kFloat4E2M1:
        raise ValueError(f"NVFP4 needs fp4_dtype=kFloat4E2M1, got {DType.cast(dtype)!r}")
