"""Recipe classes for FP8 with one scale per tensor: from earlier steps (delayed) or from its own amax (current)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from .amax_history import AmaxAlgorithm
from .base import RecipeFields, flag_from_environment, require
from .params import FAST, SPLIT, FP8Format, MMParams, QParams

ScaleAlgorithm = Callable[[Tensor, Tensor, float, "DelayedScaling"], Tensor]
"""``(amax[n], old_scale[n], fp8_max, recipe) -> scale[n]``."""


def refuse_pure_e5m2(fp8_format: FP8Format) -> None:
    """Raise if a recipe uses E5M2 in forward."""
    require(
        fp8_format is not FP8Format.E5M2, "E5M2 in both passes is not supported: use FP8Format.E4M3 or FP8Format.HYBRID"
    )


@dataclass(repr=False)
class DelayedScaling(RecipeFields):
    """FP8 with delayed scaling: the scale of a tensor is computed from its amaxes in earlier steps.

    Args:
        margin: divide scales by ``2**margin``.
        fp8_format: FP8 type of tensors in forward and in backward.
        amax_history_len: number of steps in the history.
        amax_compute_algo: how an amax follows from the history: "max", "most_recent", or a function that maps
            ``history[length, n]`` to ``amax[n]``.
        scaling_factor_compute_algo: a function ``(amax[n], old_scale[n], fp8_max, recipe) -> scale[n]`` instead of
            ``fp8_max / amax / 2**margin``.
        reduce_amax: all ranks of the group of autocast use the largest amax among them.
        override_linear_precision: not supported; must be (False, False, False).
        params_dtype: accepted, because some programs pass it to all constructors; it has no effect.
        device: accepted; it has no effect.
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: not supported; must be None.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.DelayedScaling(amax_history_len=16)):
        ...     y = layer(torch.randn(32, 32))
    """

    margin: int = 0
    fp8_format: FP8Format = FP8Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True
    override_linear_precision: InitVar[tuple[bool, bool, bool]] = (False, False, False)
    params_dtype: InitVar[Any] = None
    device: InitVar[Any] = None

    _kind: ClassVar[str] = "delayed"

    def __post_init__(self, override_linear_precision: tuple[bool, bool, bool], params_dtype: Any, device: Any) -> None:
        super().__post_init__()
        require(
            not any(override_linear_precision),
            "delayed scaling runs all GEMMs in FP8: override_linear_precision must be (False, False, False), got "
            f"{override_linear_precision}",
        )
        refuse_pure_e5m2(self.fp8_format)
        require(self.amax_history_len >= 1, f"amax_history_len must be at least 1, got {self.amax_history_len}")
        require(
            self.amax_compute_algo in ("max", "most_recent") or callable(self.amax_compute_algo),
            f"amax_compute_algo must be 'max', 'most_recent' or a function, got {self.amax_compute_algo!r}",
        )
        require(
            self.backward_override is None,
            f"delayed scaling does not support backward_override: it must be None, got {self.backward_override!r}",
        )


@dataclass(repr=False)
class Float8CurrentScaling(RecipeFields):
    """FP8 with current scaling: the scale of a tensor is computed from its own amax.

    Args:
        use_power_2_scales: scales are powers of two.
        fp8_format: FP8 type of tensors in forward and in backward.
        fp8_gemm_fprop: accepted; it has no effect, because every GEMM accumulates in fp32 here.
        fp8_gemm_dgrad: see fp8_gemm_fprop.
        fp8_gemm_wgrad: see fp8_gemm_fprop.
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: see `Recipe`.

    Attributes:
        fp8_quant_fwd_inp: how inputs are quantized.
        fp8_quant_fwd_weight: how weights are quantized.
        fp8_quant_bwd_grad: how output gradients are quantized.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.Float8CurrentScaling()):
        ...     y = layer(torch.randn(32, 32))
    """

    use_power_2_scales: bool = field(
        default_factory=partial(flag_from_environment, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    )
    fp8_format: FP8Format = FP8Format.HYBRID
    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT

    # Not fields: a class or an instance may set them.
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()

    _kind: ClassVar[str] = "float8_current_scaling"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pure_e5m2(self.fp8_format)
        if self.use_power_2_scales:
            self.fp8_quant_fwd_inp = replace(self.fp8_quant_fwd_inp, power_2_scale=True)
            self.fp8_quant_fwd_weight = replace(self.fp8_quant_fwd_weight, power_2_scale=True)
            self.fp8_quant_bwd_grad = replace(self.fp8_quant_bwd_grad, power_2_scale=True)
