"""The small values that recipes are made of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class _Largest(NamedTuple):
    """The largest finite numbers."""

    max_fwd: float
    max_bwd: float


class FP8Format(enum.Enum):
    """Element formats of a recipe, forward and backward; HYBRID is E4M3 forward and E5M2 backward."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)

    def __repr__(self) -> str:
        return f"FP8Format.{self.name}"


@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates; here every GEMM accumulates in fp32."""

    use_split_accumulator: bool = True


SPLIT = MMParams()
FAST = MMParams(use_split_accumulator=False)


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
