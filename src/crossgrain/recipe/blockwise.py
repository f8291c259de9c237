"""Recipe classes with a scale for every block: MXFP8, FP8 block scaling and NVFP4."""

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
    """MXFP8: FP8 codes with a power-of-two scale (E8M0) for every 32 numbers along the dimension that a GEMM sums.

    Args:
        margin: accepted; it has no effect.
        fp8_format: FP8 type of tensors in forward and in backward.
        enable_2d_quantization: weights have one scale per 32x32 tile, so that both directions hold the same numbers.
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: see `Recipe`.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.MXFP8BlockScaling()):
        ...     y = layer(torch.randn(32, 32))
    """

    margin: int = 0
    fp8_format: FP8Format = FP8Format.E4M3
    enable_2d_quantization: bool = False

    _kind: ClassVar[str] = "mxfp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pure_e5m2(self.fp8_format)


@dataclass(repr=False)
class Float8BlockScaling(RecipeFields):
    """FP8 block scaling: an fp32 scale for every block of 1x128 or 128x128 numbers.

    Args:
        use_f32_scales: scales may be any fp32 numbers. By default they are powers of two.
        fp8_format: FP8 type of tensors in forward and in backward.
        x_block_scaling_dim: 1 for blocks of 1x128 in inputs, 2 for blocks of 128x128.
        w_block_scaling_dim: the same for weights.
        grad_block_scaling_dim: the same for output gradients.
        fp8_gemm_fprop: must use the split accumulator; here every GEMM accumulates in fp32.
        fp8_gemm_dgrad: see fp8_gemm_fprop.
        fp8_gemm_wgrad: see fp8_gemm_fprop.
        fp8_dpa: not supported; must be False.
        fp8_mha: not supported; must be False.
        backward_override: see `Recipe`.

    Attributes:
        fp8_quant_fwd_inp: how inputs are quantized.
        fp8_quant_fwd_weight: how weights are quantized.
        fp8_quant_bwd_grad: how output gradients are quantized.

    Examples:
        >>> layer = cg.Linear(128, 128)
        >>> with cg.autocast(recipe=cg.recipe.Float8BlockScaling()):
        ...     y = layer(torch.randn(128, 128))
    """

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
            require(dim in (1, 2), f"{name}_block_scaling_dim must be 1 or 2, got {dim}")
        # Any two of the three meet in a GEMM.
        for (one, dim), (other, other_dim) in combinations(dims.items(), 2):
            require(
                not dim == other_dim == 2,
                f"{one}_block_scaling_dim and {other}_block_scaling_dim cannot both be 2: the two tensors are operands "
                "of one GEMM, and only one of them may have 128x128 blocks",
            )
        for gemm in ("fprop", "dgrad", "wgrad"):
            split = getattr(self, f"fp8_gemm_{gemm}").use_split_accumulator
            require(split, f"FP8 block scaling needs use_split_accumulator=True in fp8_gemm_{gemm}")
        require(
            not (self.fp8_dpa or self.fp8_mha),
            "FP8 block scaling does not support quantized attention: fp8_dpa and fp8_mha must be False",
        )
        if self.use_f32_scales:
            self.fp8_quant_fwd_inp = replace(self.fp8_quant_fwd_inp, power_2_scale=False)
            self.fp8_quant_fwd_weight = replace(self.fp8_quant_fwd_weight, power_2_scale=False)
            self.fp8_quant_bwd_grad = replace(self.fp8_quant_bwd_grad, power_2_scale=False)


def _scope_from_environment(name: str, default: Scope) -> Scope:
    return os.environ.get(name, default)  # type: ignore[return-value]


def _error_mode_from_environment() -> Literal["MAE", "MSE"]:
    return os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper()  # type: ignore[return-value]


def in_scope(scope: Scope, is_weight: bool) -> bool:
    """Whether an option with this scope is for a forward tensor: a weight, or an activation."""
    return scope == "all" or scope == ("weights" if is_weight else "activations")


@dataclass(repr=False)
class NVFP4BlockScaling(RecipeFields):
    """NVFP4: 4-bit codes (E2M1), an E4M3 scale for every 16 numbers, and one fp32 scale per tensor.

    By default weights have one scale per 16x16 tile, the operands of wgrad are rotated by a random Hadamard transform
    (RHT), and output gradients are rounded stochastically. The defaults can be changed by environment variables.

    Args:
        disable_rht: do not rotate the operands of wgrad.
        disable_stochastic_rounding: round output gradients to the nearest number.
        disable_2d_quantization: weights have 1x16 blocks instead of 16x16 tiles.
        row_scaled_activation: inputs have an fp32 scale for every row instead of one for the tensor.
        nvfp4_4over6: for which forward tensors each block uses the better of two scales, which map its largest number
            to 4 or to 6: "none", "weights", "activations" or "all".
        nvfp4_4over6_e4m3_use_256: for which of these tensors the scale that maps to 6 is at most 256 instead of 448, so
            that the scale that maps to 4, which is 1.5 times as large, is never out of the range of E4M3.
        nvfp4_4over6_err_mode: which of the two scales is better: "MAE" compares mean absolute errors, "MSE" mean
            squared errors.
        fp4_format: must be FP8Format.E2M1.
        fp8_format: must be FP8Format.E4M3, the type of the block scales.
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: see `Recipe`.

    Attributes:
        fp4_quant_fwd_inp: how inputs are quantized.
        fp4_quant_fwd_weight: how weights are quantized.
        fp4_quant_bwd_grad: how output gradients are quantized.

    Examples:
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.NVFP4BlockScaling(disable_rht=True)):
        ...     y = layer(torch.randn(32, 32))
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
        require(
            self.fp4_format is FP8Format.E2M1,
            f"NVFP4 codes are E2M1: fp4_format must be FP8Format.E2M1, got {self.fp4_format!r}",
        )
        require(
            self.fp8_format is FP8Format.E4M3,
            f"NVFP4 scales are E4M3: fp8_format must be FP8Format.E4M3, got {self.fp8_format!r}",
        )
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            scope = getattr(self, name)
            known = scope in ("none", "weights", "activations", "all")
            require(known, f"{name} must be 'none', 'weights', 'activations' or 'all', got {scope!r}")
        mode = self.nvfp4_4over6_err_mode
        require(mode in ("MAE", "MSE"), f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got {mode!r}")
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )
