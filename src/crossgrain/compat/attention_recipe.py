"""The recipe of attention, where Transformer Engine gives it another one than that of the layers around it.

| recipe in force | NVTE_DPA_FP8_RECIPE | recipe of attention |
|---|---|---|
| current scaling | unset, or its name | current scaling, but delayed scaling for S and dP |
| delayed scaling, MXFP8, NVFP4 | Float8CurrentScaling | the same |
| current scaling, MXFP8, NVFP4 | DelayedScaling | delayed scaling |
| delayed or current scaling, NVFP4 | MXFP8BlockScaling | MXFP8 |

Its element types are those of the recipe in force; those of attention beside NVFP4 are given apart. Histories of
delayed scaling have options of their own, unless the recipe in force has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..formats.dtypes import DType
from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.request import QuantizerRequest
from ..recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    FP8Format,
    MXFP8BlockScaling,
    QuantizerRole,
    Recipe,
)

NAMES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
_BACKWARD = ("do", "dp", "dqkv", "grad_output")


class AttentionOptions(NamedTuple):
    """What the environment says about attention.

    Attributes:
        recipe: name of a recipe class; "" for the recipe in force.
        fp8_format: element types beside NVFP4.
        amax_algo: `DelayedScaling.amax_compute_algo`.
        history: `DelayedScaling.amax_history_len`.
        reduce_amax: `DelayedScaling.reduce_amax`.
    """

    recipe: str
    fp8_format: FP8Format
    amax_algo: Any
    history: int
    reduce_amax: bool


@dataclass(frozen=True)
class CurrentAndDelayed:
    """A factory: current scaling for tensors that enter and leave attention, delayed scaling for S and dP.

    Args:
        fp8_format: element types in forward and in backward.
        power_2_scales: scales of current scaling are powers of two.
        delayed: the options of delayed scaling.
    """

    fp8_format: FP8Format
    power_2_scales: bool
    delayed: DelayedScalingRequest

    def __call__(self, role: QuantizerRole | None) -> Quantizer | QuantizerRequest:
        if role is not None and role.module_type == "dpa" and role.tensor_type in ("s", "dp"):
            return self.delayed
        backward = role is not None and (role.tensor_type in _BACKWARD or role.name.endswith("dpa_grad_input"))
        wide = self.fp8_format is FP8Format.E5M2 or (self.fp8_format is FP8Format.HYBRID and backward)
        dtype = DType.kFloat8E5M2 if wide else DType.kFloat8E4M3
        return Float8CurrentScalingQuantizer(dtype, force_pow_2_scales=self.power_2_scales)


def attention_recipe(recipe: Recipe, options: AttentionOptions) -> Recipe | None:
    """The recipe of attention; None if it is the recipe in force."""
    given: Any = recipe
    asked = options.recipe or ("Float8CurrentScaling" if recipe.float8_current_scaling() else "")
    known = recipe.delayed() or recipe.float8_current_scaling() or recipe.mxfp8() or recipe.nvfp4()
    same = asked == type(recipe).__name__ and not recipe.float8_current_scaling()
    if asked not in NAMES or not known or same or not (given.fp8_dpa or given.fp8_mha):
        return None
    fp8_format = options.fp8_format if recipe.nvfp4() else given.fp8_format
    common = {"fp8_format": fp8_format, "fp8_dpa": given.fp8_dpa, "fp8_mha": given.fp8_mha}
    own = DelayedScalingRequest(
        fp8_format=fp8_format,
        amax_history_len=options.history,
        amax_compute_algo=options.amax_algo,
        reduce_amax=options.reduce_amax,
    )
    if asked == "DelayedScaling":
        made = own.recipe()
        made.fp8_dpa, made.fp8_mha, made.nonfinite = given.fp8_dpa, given.fp8_mha, given.nonfinite
        return made
    common |= {"backward_override": given.backward_override, "nonfinite": given.nonfinite}
    if asked == "MXFP8BlockScaling":
        return MXFP8BlockScaling(**common)
    current = given if recipe.float8_current_scaling() else Float8CurrentScaling(fp8_format=fp8_format)
    delayed = _request_of(given) if isinstance(given, DelayedScaling) else own
    return CustomRecipe(CurrentAndDelayed(fp8_format, current.use_power_2_scales, delayed), **common)


def _request_of(recipe: DelayedScaling) -> DelayedScalingRequest:
    return DelayedScalingRequest(
        fp8_format=recipe.fp8_format,
        margin=recipe.margin,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        scaling_factor_compute_algo=recipe.scaling_factor_compute_algo,
        reduce_amax=recipe.reduce_amax,
    )
