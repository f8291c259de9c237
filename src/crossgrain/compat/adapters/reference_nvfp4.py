"""NVFP4 by crossgrain's reference kernels, which are plain torch code."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...formats import HADAMARD_SIZE
from ...formats.dtypes import DType
from ...gemm import gemm
from ...kernels.choice import using_backend
from ...kernels.reference.hadamard import rotate
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane
from ...quantizers.nvfp4 import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from ...recipe import QuantizerRole, quantizer_factory
from .reference_gemm import GEMMType
from .reference_utils import Fp4Formats

__all__ = ["NVFP4QuantizerRef", "NVFP4TensorRef", "nvfp4_ref_rht_2d_factory"]


class NVFP4TensorRef(NVFP4TensorStorage):
    """An NVFP4 tensor: ``data`` [M, K/2], ``scale`` [M, K/16] of rows; ``data_t``, ``scale_t`` of columns; unpadded."""

    @property
    def data(self) -> Tensor | None:
        return self._rowwise_data

    @property
    def scale(self) -> Tensor | None:
        return self._scales(ROWWISE)

    @property
    def data_t(self) -> Tensor | None:
        return self._columnwise_data

    @property
    def scale_t(self) -> Tensor | None:
        return self._scales(COLUMNWISE)

    @property
    def global_amax_row(self) -> Tensor | None:
        return self._amax_rowwise

    @property
    def global_amax_col(self) -> Tensor | None:
        return self._amax_columnwise

    @property
    def original_shape(self) -> torch.Size:
        return self.shape

    def _scales(self, direction: Direction) -> Tensor | None:
        plane = self.plane(direction)
        return None if plane is None else plane.operand_scales().contiguous().view(torch.float8_e4m3fn)


class _ReferenceTensor(NVFP4Tensor, NVFP4TensorRef):
    """`NVFP4TensorRef` as a torch.Tensor."""


class NVFP4QuantizerRef(NVFP4Quantizer):
    """Quantizes with the reference kernels; the results are storages, not torch tensors.

    Args:
        dtype: the only format is E2M1.
        rowwise: make a rowwise plane.
        columnwise: make a columnwise plane.
        pow_2_scales: not supported; must be False.
        eps: not supported; must be 0.
        quant_tile_shape: numbers that share a scale: (1, 16), or (16, 16).
        row_scaled_nvfp4: see `NVFP4Quantizer`; so are the other options of 4-over-6.
        nvfp4_use_4over6: use the better of two scales for each block.
        nvfp4_e4m3_max: the largest scale.
        nvfp4_4over6_err_mode: how errors are compared.
        nvfp4_4over6_err_use_fast_math: must be False.
        with_rht: rotate the columnwise plane by a random Hadamard transform.
        with_random_sign_mask: use random signs in the rotation.
    """

    _tensor_class = _ReferenceTensor
    custom = True

    def __init__(
        self,
        dtype: Fp4Formats = Fp4Formats.E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
        quant_tile_shape: tuple[int, int] = (1, 16),
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE",
        nvfp4_4over6_err_use_fast_math: bool = False,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
    ) -> None:
        if nvfp4_4over6_err_use_fast_math:
            raise NotImplementedError(
                "NVFP4QuantizerRef: nvfp4_4over6_err_use_fast_math=True compares the errors of 4-over-6 in half "
                "precision, for the speed of GPUs. crossgrain only compares them in float32"
            )
        if pow_2_scales or eps:
            raise NotImplementedError(
                "NVFP4QuantizerRef does not support pow_2_scales and eps: the scales of NVFP4 are E4M3 numbers"
            )
        if quant_tile_shape not in ((1, 16), (16, 16)):
            raise ValueError(f"NVFP4QuantizerRef: quant_tile_shape must be (1, 16) or (16, 16), got {quant_tile_shape}")
        super().__init__(
            DType.kFloat4E2M1,
            rowwise=rowwise,
            columnwise=columnwise,
            with_rht=with_rht,
            with_post_rht_amax=with_rht,
            with_2d_quantization=quant_tile_shape == (16, 16),
            with_random_sign_mask=with_random_sign_mask,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
        )
        self.internal = True

    def quantize_impl(self, tensor: Tensor) -> Any:
        with using_backend("reference"):
            return super().quantize_impl(tensor)

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        gemm_type: GEMMType | None = None,
        qresult_x: NVFP4TensorStorage | None = None,
        qresult_w: NVFP4TensorStorage | None = None,
    ) -> Tensor:
        """Multiply codes: ``x · wᵀ`` of x [M, K] and w [N, K], both with blocks along K.

        Args:
            qx: the codes of x [M, K/2].
            qw: the codes of w [N, K/2].
            m_params: accepted; it has no effect.
            out_dtype: dtype of the result.
            sx: the block scales of x [M, K/16].
            sw: the block scales of w [N, K/16].
            bias: added to the result.
            out: with ``accumulate``, the result is added to a copy of this tensor.
            accumulate: see ``out``.
            gemm_type: for `GEMMType.WGRAD`, amaxes are those of columns, otherwise those of rows.
            qresult_x: the tensor that has the amax of x, and its format.
            qresult_w: the same for w.

        Returns:
            The result [M, N].

        Raises:
            ValueError: a tensor with an amax is missing, or only one of ``accumulate`` and ``out`` is given.
        """
        if qresult_x is None or qresult_w is None:
            raise ValueError("NVFP4QuantizerRef.qgemm: qresult_x and qresult_w are needed: they have the amaxes")
        if accumulate != (out is not None):
            raise ValueError("NVFP4QuantizerRef.qgemm: out is what accumulate=True adds to: give both, or neither")
        direction = COLUMNWISE if gemm_type is GEMMType.WGRAD else ROWWISE
        x, w = (
            _rowwise_plane(codes, scales, of, direction)
            for codes, scales, of in ((qx, sx, qresult_x), (qw, sw, qresult_w))
        )
        into = None if out is None else out.clone()
        with using_backend("reference"):
            return gemm("fprop", x, w, out_dtype=out_dtype, bias=bias, out=into, accumulate=accumulate)

    def _apply_rht(self, x: Tensor) -> Tensor:
        """``x`` with its last dimension rotated in blocks of 16, in its dtype; as it is without ``with_rht``."""
        if not self.with_rht:
            return x
        if x.shape[-1] % HADAMARD_SIZE:
            raise ValueError(f"the last dimension is rotated in blocks of {HADAMARD_SIZE}, got shape {list(x.shape)}")
        return rotate(x.float(), self.rht_matrix_random_sign_mask_t).to(x.dtype)


def _rowwise_plane(codes: Tensor, scales: Tensor, of: NVFP4TensorStorage, direction: Direction) -> Plane:
    """A rowwise plane with the format and the amax of a direction of another tensor."""
    known = of.plane(direction)
    if known is None:
        raise ValueError(f"NVFP4QuantizerRef.qgemm: the tensor with the amax has no {direction.value} data")
    plane = empty_plane(known.format, ROWWISE, (codes.shape[0], codes.shape[1] * 2), device=codes.device)
    plane.data.copy_(codes.view(torch.uint8))
    plane.operand_scales().copy_(scales.view(torch.uint8))
    if plane.amax is not None and known.amax is not None:
        plane.amax.copy_(known.amax)
    return plane


@quantizer_factory(key=("nvfp4_ref_rht_2d_factory", 1))
def nvfp4_ref_rht_2d_factory(role: QuantizerRole | None) -> NVFP4QuantizerRef:
    """A factory: 16x16 tiles for weights; for all other tensors plain rows and rotated columns."""
    if role is not None and role.tensor_type == "weight":
        return NVFP4QuantizerRef(quant_tile_shape=(16, 16))
    return NVFP4QuantizerRef(with_rht=True)
