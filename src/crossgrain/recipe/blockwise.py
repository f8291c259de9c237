"""Recipes with a scale for every block: MXFP8, FP8 with fp32 scales, NVFP4."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import ClassVar, Literal

from .base import RecipeFields, flag_from_environment, require
from .params import SPLIT, FP8Format, MMParams, QParams
from .per_tensor import refuse_pure_e5m2

Scope = Literal["none", "weights", "activations", "all"]


@dataclass(repr=False)
class MXFP8BlockScaling(RecipeFields):
    """A power-of-two scale for every 32 along the summed dimension; weights perhaps by 32x32 tiles."""

    margin: int = 0  # no meaning here, kept for callers that pass it
    fp8_format: FP8Format = FP8Format.E4M3
    enable_2d_quantization: bool = False

    _kind: ClassVar[str] = "mxfp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pure_e5m2(self.fp8_format)


@dataclass(repr=False)
class Float8BlockScaling(RecipeFields):
    """An fp32 scale for every 1x128 (dim 1) or 128x128 (dim 2) block, a power of two unless ``use_f32_scales``."""

    use_f32_scales: bool = field(default_factory=partial(flag_from_environment, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"))
    fp8_format: FP8Format = FP8Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT

    # Not fields: a class or an instance may set them.
    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)

    _kind: ClassVar[str] = "float8_block_scaling"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pure_e5m2(self.fp8_format)
        dims = {"x": self.x_block_scaling_dim, "w": self.w_block_scaling_dim, "grad": self.grad_block_scaling_dim}
        for name, dim in dims.items():
            require(dim in (1, 2), f"{name}_block_scaling_dim is 1 or 2, not {dim}")
        # Any two of the three meet in a GEMM.
        for (one, dim), (other, other_dim) in combinations(dims.items(), 2):
            require(not dim == other_dim == 2, f"{one} and {other} meet in a GEMM and cannot both have 128x128 blocks")
        for gemm in ("fprop", "dgrad", "wgrad"):
            split = getattr(self, f"fp8_gemm_{gemm}").use_split_accumulator
            require(split, f"FP8 block scaling needs the split accumulator in {gemm}")
        require(not (self.fp8_dpa or self.fp8_mha), "FP8 block scaling has no quantized attention")
        if self.use_f32_scales:
            self.fp8_quant_fwd_inp = replace(self.fp8_quant_fwd_inp, power_2_scale=False)
            self.fp8_quant_fwd_weight = replace(self.fp8_quant_fwd_weight, power_2_scale=False)
            self.fp8_quant_bwd_grad = replace(self.fp8_quant_bwd_grad, power_2_scale=False)


def _scope_from_environment(name: str, default: Scope) -> Scope:
    return os.environ.get(name, default)  # type: ignore[return-value]


def _error_mode_from_environment() -> Literal["MAE", "MSE"]:
    return os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()  # type: ignore[return-value]


def in_scope(scope: Scope, is_weight: bool) -> bool:
    """Whether a forward tensor is among those that an option is for."""
    return scope == "all" or scope == ("weights" if is_weight else "activations")


@dataclass(repr=False)
class NVFP4BlockScaling(RecipeFields):
    """4-bit codes, an E4M3 scale for every 16, one fp32 scale per tensor.

    By default weights share a scale over 16x16 tiles, inputs and gradients are rotated (RHT) for wgrad, and
    gradients are rounded stochastically. ``nvfp4_4over6`` says which forward tensors choose the better of
    two scales per block, ``nvfp4_4over6_e4m3_use_256`` which of those leave headroom for it.
    """

    disable_rht: bool = field(default_factory=partial(flag_from_environment, "NVTE_NVFP4_DISABLE_RHT"))
    disable_stochastic_rounding: bool = field(
        default_factory=partial(flag_from_environment, "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    )
    disable_2d_quantization: bool = field(
        default_factory=partial(flag_from_environment, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    )
    row_scaled_activation: bool = field(
        default_factory=partial(flag_from_environment, "NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    )
    nvfp4_4over6: Scope = field(default_factory=partial(_scope_from_environment, "NVTE_NVFP4_4OVER6", "none"))
    nvfp4_4over6_e4m3_use_256: Scope = field(
        default_factory=partial(_scope_from_environment, "NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
    )
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = field(default_factory=_error_mode_from_environment)
    fp4_format: FP8Format = FP8Format.E2M1
    fp8_format: FP8Format = FP8Format.E4M3

    _kind: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.fp4_format is FP8Format.E2M1, f"NVFP4 codes are E2M1, not {self.fp4_format!r}")
        require(self.fp8_format is FP8Format.E4M3, f"NVFP4 scales are E4M3, not {self.fp8_format!r}")
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            scope = getattr(self, name)
            known = scope in ("none", "weights", "activations", "all")
            require(known, f"{name} is 'none', 'weights', 'activations' or 'all', not {scope!r}")
        mode = self.nvfp4_4over6_err_mode
        require(mode in ("MAE", "MSE"), f"nvfp4_4over6_err_mode is 'MAE' or 'MSE', not {mode!r}")
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )
