"""Small values that are options of recipes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class _Largest(NamedTuple):
    """The largest finite numbers in forward and in backward."""

    max_fwd: float
    max_bwd: float


class FP8Format(enum.Enum):
    """The element types of a recipe in forward and in backward. HYBRID is E4M3 in forward and E5M2 in backward.

    Examples:
        >>> cg.recipe.DelayedScaling(fp8_format=cg.recipe.FP8Format.E4M3).fp8_format.name
        'E4M3'
    """

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)

    def __repr__(self) -> str:
        return f"FP8Format.{self.name}"


@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates. It has no effect here: every GEMM accumulates in fp32.

    Examples:
        >>> cg.recipe.Float8CurrentScaling().fp8_gemm_fprop
        MMParams(use_split_accumulator=False)
    """

    use_split_accumulator: bool = True


SPLIT = MMParams()
FAST = MMParams(use_split_accumulator=False)


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized.

    Attributes:
        power_2_scale: scales are powers of two.
        amax_epsilon: smallest amax that is used to compute a scale.
        random_hadamard_transform: rotate columnwise data.
        stochastic_rounding: round stochastically instead of to the nearest number.
        fp4_2d_quantization: one scale per 16x16 tile instead of per 1x16 block.

    Examples:
        >>> cg.recipe.NVFP4BlockScaling().fp4_quant_bwd_grad.stochastic_rounding
        True
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
