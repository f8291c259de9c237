"""The field's names for element types, and what they are here."""

from __future__ import annotations

import enum
from typing import Any

import torch

from . import E2M1, E4M3, E5M2, AnyElement, Element


class DType(enum.IntEnum):
    """Element types by the numbers that other libraries of the field use."""

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
        """From itself, from an int, or from an enum of another library with the same numbers."""
        return cls(int(value))

    @property
    def element(self) -> Element:
        """The element format, for the types that are one."""
        try:
            return _ELEMENT_OF[self]
        except KeyError:
            raise ValueError(f"{self!r} is not a quantized element type") from None


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
"""What can be quantized, and what a quantized tensor may pretend to be."""


def fp8_dtype(value: Any) -> DType:
    """``value`` as one of the two FP8 types."""
    dtype = DType.cast(value)
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise ValueError(f"an FP8 format needs kFloat8E4M3 or kFloat8E5M2, not {dtype!r}")
    return dtype


def dtype_of_element(element: AnyElement) -> DType:
    """``dtype_of_element(E4M3) is DType.kFloat8E4M3``."""
    return next(dtype for dtype, known in _ELEMENT_OF.items() if known == element)
