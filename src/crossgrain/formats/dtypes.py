"""`DType`: Transformer Engine's names for element types."""

from __future__ import annotations

import enum
from typing import Any

import torch

from . import E2M1, E4M3, E5M2, AnyElement, Element


class DType(enum.IntEnum):
    """Element types, with the numbers of Transformer Engine.

    Examples:
        >>> cg.DType.kFloat8E4M3
        <DType.kFloat8E4M3: 7>
        >>> int(cg.DType.kFloat8E5M2)
        8
    """

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: Any) -> DType:
        """Convert a DType, an int, or an enum of another library with the same numbers."""
        return cls(int(value))

    @property
    def element(self) -> Element:
        """The element of this type.

        Raises:
            ValueError: the type is not FP8 or FP4.
        """
        try:
            return _ELEMENT_OF[self]
        except KeyError:
            raise ValueError(f"{self!r} is not a type of quantized elements (FP8 or FP4)") from None


_ELEMENT_OF = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}

TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.half: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
TE_DType_To_Torch: dict[DType, torch.dtype] = {ours: theirs for theirs, ours in TE_DType.items()}

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be quantized, and that the nominal dtype of a quantized tensor can be."""


def fp8_dtype(value: Any) -> DType:
    """Convert to one of the two FP8 types.

    Raises:
        ValueError: it is another type.
    """
    dtype = DType.cast(value)
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise ValueError(f"the FP8 type must be kFloat8E4M3 or kFloat8E5M2, got {dtype!r}")
    return dtype


def dtype_of_element(element: AnyElement) -> DType:
    """The type of an element: ``dtype_of_element(E4M3) is DType.kFloat8E4M3``."""
    return next(dtype for dtype, known in _ELEMENT_OF.items() if known == element)
