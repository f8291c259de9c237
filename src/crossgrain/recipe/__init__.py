"""Recipes: which number formats a model trains in.

There are recipe classes (`MXFP8BlockScaling`, `NVFP4BlockScaling`, ...), recipes that call a factory (`CustomRecipe`),
and recipes by GEMM (`GemmRecipe`), which can be written in one line of text. `autocast` makes a recipe active.
"""

from . import factories, zoo
from .base import Recipe
from .blockwise import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from .coerce import as_recipe
from .compact import recipe_of_sites
from .compatibility import check_weight_matches_recipe, warn_of_another_recipe
from .context import (
    PrecisionContext,
    active,
    active_recipe,
    autocast,
    backward_note,
    forward_part,
    forward_step,
    fp8_autocast,
    fp8_model_init,
    one_step,
    quantized_model_init,
    this_pass,
)
from .custom import CustomRecipe, quantizer_factory
from .custom_state import CustomRecipeState
from .delayed_state import DelayedScalingRecipeState
from .explain import Explanation
from .explain_schedule import ScheduleExplanation
from .extra_state import check_extra_state, extra_state_of, load_extra_state, read_extra_state
from .format_spec import FormatSpec
from .gemm_recipe import GemmRecipe
from .global_state import FP8GlobalStateManager
from .pairing import check_pairs
from .params import FP8Format, MMParams, QParams
from .per_tensor import DelayedScaling, Float8CurrentScaling
from .phases import PhaseRule
from .presets import PRESETS, SCHEDULES, preset_table
from .quantize import quantizer_for
from .requests import DelayedScalingRequest
from .roles import QuantizerRole
from .rules import Rule
from .schedule import Phase, RecipeSchedule
from .state import (
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
)
from .support import (
    check_recipe_support,
    get_align_size_for_quantization,
    get_default_fp8_recipe,
    get_default_recipe,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .syntax import RecipeSyntaxError

__all__ = [
    "PRESETS",
    "SCHEDULES",
    "CustomRecipe",
    "CustomRecipeState",
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "Explanation",
    "FP8Format",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScaling",
    "Float8CurrentScalingRecipeState",
    "FormatSpec",
    "GemmRecipe",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScaling",
    "NVFP4BlockScalingRecipeState",
    "Phase",
    "PhaseRule",
    "PrecisionContext",
    "QParams",
    "QuantizerRole",
    "Recipe",
    "RecipeSchedule",
    "RecipeState",
    "RecipeSyntaxError",
    "Rule",
    "ScheduleExplanation",
    "active",
    "active_recipe",
    "as_recipe",
    "autocast",
    "backward_note",
    "check_extra_state",
    "check_pairs",
    "check_recipe_support",
    "check_weight_matches_recipe",
    "extra_state_of",
    "factories",
    "forward_part",
    "forward_step",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "load_extra_state",
    "one_step",
    "preset_table",
    "quantized_model_init",
    "quantizer_factory",
    "quantizer_for",
    "read_extra_state",
    "recipe_of_sites",
    "this_pass",
    "warn_of_another_recipe",
    "zoo",
]
