"""FP8 with one scale per tensor: from earlier steps (delayed) or from the tensor itself (current)."""

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
    require(
        fp8_format is not FP8Format.E5M2, "E5M2 in both passes is not supported: use FP8Format.E4M3 or FP8Format.HYBRID"
    )


@dataclass(repr=False)
class DelayedScaling(RecipeFields):
    """The scale of a step follows from the amaxes of the ``amax_history_len`` steps before it.

    ``amax_compute_algo``            "max" of the window, "most_recent", or ``f(history[len, n]) -> amax[n]``
    ``scaling_factor_compute_algo``  replaces ``fp8_max / amax / 2**margin``
    ``reduce_amax``                  all ranks of the group use the largest amax among them
    ``override_linear_precision``    (fprop, dgrad, wgrad) in high precision: none of them, here

    ``params_dtype`` and ``device`` are options of modules, which clients hand to everything; they mean nothing here.
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
            "delayed scaling has all GEMMs in FP8: override_linear_precision is (False, False, False), not "
            f"{override_linear_precision}",
        )
        refuse_pure_e5m2(self.fp8_format)
        require(self.amax_history_len >= 1, f"amax_history_len is at least 1, not {self.amax_history_len}")
        require(
            self.amax_compute_algo in ("max", "most_recent") or callable(self.amax_compute_algo),
            f"amax_compute_algo is 'max', 'most_recent' or a function, not {self.amax_compute_algo!r}",
        )
        require(self.backward_override is None, "delayed scaling takes no backward_override")


@dataclass(repr=False)
class Float8CurrentScaling(RecipeFields):
    """The scale follows from the tensor's own amax."""

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
