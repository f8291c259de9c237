"""Table of names: recipes, contexts and factories."""

from __future__ import annotations

from .entries import Entry, these

_SUPPORT = "crossgrain.recipe.support"

QUANTIZATION: dict[str, Entry] = {
    "transformer_engine.pytorch.quantization": {
        "*": ["crossgrain.recipe.context", _SUPPORT, "crossgrain.recipe"],  # first where contexts look names up
        **these("crossgrain.recipe.delayed_state", "_amax_and_scale_update", "_default_sf_compute"),
        **these("crossgrain.compat.adapters.contexts", "autocast", "fp8_autocast", "fp8_model_init"),
        **these("crossgrain.quantizers.request", "QuantizerRequest"),
        **these("crossgrain.recipe.global_state", "FP8GlobalStateManager", FP8GlobalState="QuantizationState"),
    },
    "transformer_engine.pytorch.fp8": "transformer_engine.pytorch.quantization",
    "transformer_engine.pytorch.custom_recipes": {},
    "transformer_engine.pytorch.custom_recipes.quantizer_factories": "crossgrain.recipe.factories",
    "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo": "crossgrain.recipe.zoo",
    "transformer_engine.pytorch.custom_recipes.gemm": "crossgrain.compat.adapters.reference_gemm",
    "transformer_engine.pytorch.custom_recipes.reference_utils": "crossgrain.compat.adapters.reference_utils",
    "transformer_engine.pytorch.custom_recipes.reference_current_scaling": (
        "crossgrain.compat.adapters.reference_current_scaling"
    ),
    "transformer_engine.pytorch.custom_recipes.reference_nvfp4": "crossgrain.compat.adapters.reference_nvfp4",
}
