"""GEMMs of reference tensors: the same as of all others."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from .gemm import Results, general_gemm

__all__ = ["GEMMType", "MMParams", "custom_gemm"]


class GEMMType(enum.Enum):
    """Of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """How to multiply."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


def custom_gemm(A: Any, B: Any, workspace: Any = None, **options: Any) -> Results:
    """`general_gemm`."""
    return general_gemm(A, B, workspace, **options)
