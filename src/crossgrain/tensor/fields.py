"""Storage classes with the buffer names that most formats of Transformer Engine have."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..formats.dtypes import DType, dtype_of_element
from ..planes import COLUMNWISE, ROWWISE
from .holder import PlaneBuffers
from .storage import QuantizedTensorStorage, copy_plane


class FP8Storage(QuantizedTensorStorage):
    """A storage whose codes are FP8 numbers."""

    @property
    def _fp8_dtype(self) -> DType:
        element = self._formats[ROWWISE].element
        assert element is not None
        return dtype_of_element(element)


class DataAndScaleStorage(QuantizedTensorStorage):
    """A storage with separate buffers for the codes and scales of each direction."""

    _buffer_names: ClassVar[tuple[str, ...]] = (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    )
    _plane_buffers: ClassVar = {
        ROWWISE: PlaneBuffers("_rowwise_data", "_rowwise_scale_inv"),
        COLUMNWISE: PlaneBuffers("_columnwise_data", "_columnwise_scale_inv"),
    }

    _rowwise_data: Tensor | None
    _columnwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_scale_inv: Tensor | None

    @property
    def _has_tiles(self) -> bool:
        """Whether each scale is for a square tile (2-D scaling)."""
        return self._formats[ROWWISE].block_rows > 1

    def _create_columnwise(self) -> None:
        """Make the columnwise plane from the current rowwise plane, if that is exact; otherwise raise."""
        made, present = self._synthesise(COLUMNWISE), self.plane(COLUMNWISE)
        if present is None:
            self._adopt_plane(made)
        else:
            copy_plane(present, made)
            self._mark_written()

    def _common_metadata(self) -> dict[str, Any]:
        """The constructor arguments that all these formats have."""
        buffers = {name.removeprefix("_"): getattr(self, name) for name in self._buffer_names}
        metadata = {"quantizer": self._quantizer, "fake_dtype": self._dtype, "formats": self._formats}
        return self._lending({**buffers, **metadata})


class DataScaleAndAmaxStorage(DataAndScaleStorage):
    """A storage with separate buffers for the codes, scales and amaxes of each direction."""

    _buffer_names = (*DataAndScaleStorage._buffer_names, "_amax_rowwise", "_amax_columnwise")
    _plane_buffers: ClassVar = {
        direction: buffers._replace(amax=f"_amax_{direction.value}")
        for direction, buffers in DataAndScaleStorage._plane_buffers.items()
    }

    _amax_rowwise: Tensor | None
    _amax_columnwise: Tensor | None


def refuse_swizzled(with_gemm_swizzled_scales: bool) -> None:
    """Raise ValueError if scales are in the swizzled layout of GPU GEMMs."""
    if with_gemm_swizzled_scales:
        raise ValueError(
            "with_gemm_swizzled_scales=True is not supported: convert the scales with crossgrain.unswizzle_scales first"
        )
