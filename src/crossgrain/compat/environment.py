"""The environment variables of Transformer Engine that change numbers: which have an effect here, and what to use else.

`VARIABLES` is the one list of them; docs/how-to/transformer_engine.md has the same table. Variables are read when an
autocast of Transformer Engine's names is entered, or when a recipe is created, never when something is imported.
"""

from __future__ import annotations

import copy
import os
from typing import NamedTuple

from ..recipe import FP8Format, Recipe
from ..runtime.logs import warn
from .adapters import attention
from .attention_recipe import NAMES, AttentionOptions, attention_recipe

DPA_RECIPE = "NVTE_DPA_FP8_RECIPE"


class Variable(NamedTuple):
    """An environment variable.

    Attributes:
        name: its name.
        neutral: the values that ask for nothing else than what happens here anyway; () if every value is obeyed.
        here: what it does here; or, if it has no effect, what to use instead.
    """

    name: str
    neutral: tuple[str, ...]
    here: str

    @property
    def obeyed(self) -> bool:
        """Whether all its values have their effect here."""
        return not self.neutral


_OF_RECIPES = "the default of {} in recipes that are created afterwards"
_OF_DELAYED = "`{}` of delayed scaling in attention, where that is not the recipe in force"
_BY_ROLE = "instead, give attention quantizers of its own: CustomRecipe with a factory for the roles 'dpa', {}"

VARIABLES = (
    Variable("NVTE_BACKWARD_OVERRIDE", (), _OF_RECIPES.format("`backward_override`")),
    Variable("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", (), _OF_RECIPES.format("`use_power_2_scales`")),
    Variable("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", (), _OF_RECIPES.format("`use_f32_scales`")),
    Variable("NVTE_NVFP4_DISABLE_RHT", (), _OF_RECIPES.format("`disable_rht`")),
    Variable("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", (), _OF_RECIPES.format("`disable_stochastic_rounding`")),
    Variable("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", (), _OF_RECIPES.format("`disable_2d_quantization`")),
    Variable("NVTE_NVFP4_ROW_SCALED_ACTIVATION", (), _OF_RECIPES.format("`row_scaled_activation`")),
    Variable("NVTE_NVFP4_4OVER6", (), _OF_RECIPES.format("`nvfp4_4over6`")),
    Variable("NVTE_NVFP4_4OVER6_E4M3_USE_256", (), _OF_RECIPES.format("`nvfp4_4over6_e4m3_use_256`")),
    Variable("NVTE_NVFP4_4OVER6_ERR_MODE", (), _OF_RECIPES.format("`nvfp4_4over6_err_mode`")),
    Variable("NVTE_UNFUSED_FP8_UPDATE", (), "how delayed scaling rounds its scales"),
    Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", (), "all algorithms are deterministic"),
    Variable("NVTE_UnfusedDPA_Emulate_FP8", (), "quantized attention is always emulated"),
    Variable("NVTE_FLASH_ATTN", (), "there is no flash attention"),
    Variable("NVTE_FUSED_ATTN", (), "there is no fused attention"),
    Variable(
        DPA_RECIPE,
        (),
        "the recipe of attention: DelayedScaling, Float8CurrentScaling (S and dP have delayed scaling), "
        "MXFP8BlockScaling, or F16 for high precision; other names are warned about",
    ),
    Variable("NVTE_DPA_FP8_RECIPE_DPA", ("0",), "instead, set fp8_dpa=True in the recipe"),
    Variable("NVTE_DPA_FP8_RECIPE_MHA", ("0",), "instead, set fp8_mha=True in the recipe"),
    Variable("NVTE_DPA_FP8_FORMAT", (), "element types of attention beside NVFP4: HYBRID or E4M3"),
    Variable("NVTE_DPA_FP8DS_AMAX_ALGO", (), _OF_DELAYED.format("amax_compute_algo")),
    Variable("NVTE_DPA_FP8DS_AMAX_HISTLEN", (), _OF_DELAYED.format("amax_history_len")),
    Variable("NVTE_DPA_FP8DS_REDUCE_AMAX", (), _OF_DELAYED.format("reduce_amax")),
    Variable("NVTE_FP8_DPA_BWD", ("1",), "instead, set backward_override='high_precision' in the recipe"),
    Variable("NVTE_DPA_FP8CS_O_in_F16", ("1",), _BY_ROLE.format("with a quantizer for the output")),
    Variable("NVTE_UNFUSED_ATTN", ("1",), "unfused attention is the only one there is"),
    Variable("NVTE_FUSED_ATTN_BACKEND", ("",), "unfused attention is the only one there is"),
    Variable("NVTE_FUSED_ATTN_USE_FAv2_BWD", ("0",), "unfused attention is the only one there is"),
    Variable("NVTE_APPLY_QK_LAYER_SCALING", ("0",), "instead, pass softmax_scale to the attention"),
    Variable("NVTE_USE_FAST_MATH", ("0",), "kernels compute exactly what the formats say"),
    Variable("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", ("0",), "errors are compared in fp32"),
    Variable(
        "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
        ("1",),
        "the output of a norm is always rounded to the dtype of its input before it is quantized",
    ),
)

# Names under which clients replace what Transformer Engine has read, and what they are if nobody has.
_REPLACED = {
    DPA_RECIPE: ("_dpa_fp8_recipe", ""),
    "NVTE_DPA_FP8_RECIPE_DPA": ("_dpa_fp8_recipe_dpa", "0"),
    "NVTE_DPA_FP8_RECIPE_MHA": ("_dpa_fp8_recipe_mha", "0"),
    "NVTE_DPA_FP8_FORMAT": ("_dpa_fp8_format", "HYBRID"),
    "NVTE_DPA_FP8DS_AMAX_ALGO": ("_dpa_fp8ds_amax_algo", "most_recent"),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": ("_dpa_fp8ds_amax_histlen", "1"),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": ("_dpa_fp8ds_reduce_amax", "1"),
}


def _value(name: str) -> str | None:
    """The value of a variable now: what a client has put in its place, or what the environment says."""
    if name in _REPLACED:
        attribute, usual = _REPLACED[name]
        value = getattr(attention, attribute)
        text = str(int(value)) if isinstance(value, bool) else str(getattr(value, "name", value))
        if text != usual:
            return text
    return os.environ.get(name)


def warn_about_ignored(recipe: Recipe) -> None:
    """Warn, once for each variable, about values that have no effect here.

    Args:
        recipe: the recipe in force.
    """
    asked = _value(DPA_RECIPE)
    if asked not in (None, "", "F16", *NAMES):
        warn(
            __name__,
            f"the environment variable {DPA_RECIPE}={asked} has no effect: it must be F16, {', '.join(NAMES)} or empty",
            subject=DPA_RECIPE,
        )
    for variable in VARIABLES:
        value = _value(variable.name)
        if value is None or variable.obeyed or value in variable.neutral:
            continue
        warn(
            __name__,
            f"the environment variable {variable.name}={value} has no effect here: {variable.here}",
            subject=variable.name,
        )


def with_attention_of_environment(recipe: Recipe) -> Recipe:
    """The recipe with what NVTE_DPA_FP8_RECIPE says about attention."""
    if not (recipe.fp8_dpa or recipe.fp8_mha):
        return recipe
    if _value(DPA_RECIPE) == "F16":
        changed = copy.copy(recipe)
        changed.fp8_dpa = changed.fp8_mha = False
        return changed
    own = attention_recipe(recipe, _attention_options())
    if own is None:
        return recipe
    changed = copy.copy(recipe)
    changed.set_attention(own)
    return changed


def _attention_options() -> AttentionOptions:
    def value(name: str) -> str:
        given = _value(name)
        return _REPLACED[name][1] if given is None else given

    fp8_format = value("NVTE_DPA_FP8_FORMAT")
    if fp8_format not in FP8Format.__members__:
        raise ValueError(f"NVTE_DPA_FP8_FORMAT must be HYBRID, E4M3 or E5M2, got {fp8_format!r}")
    return AttentionOptions(
        recipe=value(DPA_RECIPE),
        fp8_format=FP8Format[fp8_format],
        amax_algo=value("NVTE_DPA_FP8DS_AMAX_ALGO"),
        history=int(value("NVTE_DPA_FP8DS_AMAX_HISTLEN")),
        reduce_amax=value("NVTE_DPA_FP8DS_REDUCE_AMAX") == "1",
    )
