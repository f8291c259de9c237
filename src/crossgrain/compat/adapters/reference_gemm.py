"""Products of reference tensors; they are computed like all others."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from .gemm import Results, general_gemm

__all__ = ["GEMMType", "MMParams", "custom_gemm"]


class GEMMType(enum.Enum):
    """The three GEMMs of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """Options of a product."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


def custom_gemm(A: Any, B: Any, workspace: Any = None, **options: Any) -> Results:
    """Call `general_gemm` with the same arguments."""
    return general_gemm(A, B, workspace=workspace, **options)
