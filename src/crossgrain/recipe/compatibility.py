"""Which recipes can use a weight that is quantized already."""

from __future__ import annotations

from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer
from .base import Recipe
from .blockwise import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from .custom import CustomRecipe
from .per_tensor import DelayedScaling, Float8CurrentScaling

_RECIPE_OF: dict[type[Quantizer], type[Recipe]] = {
    Float8Quantizer: DelayedScaling,
    Float8CurrentScalingQuantizer: Float8CurrentScaling,
    MXFP8Quantizer: MXFP8BlockScaling,
    Float8BlockQuantizer: Float8BlockScaling,
    NVFP4Quantizer: NVFP4BlockScaling,
}


def compatible_recipe(quantizer: type[Quantizer]) -> type[Recipe]:
    """The recipe whose weights such a quantizer makes; all others come from factories."""
    return next((_RECIPE_OF[cls] for cls in quantizer.__mro__ if cls in _RECIPE_OF), CustomRecipe)


def check_weight_matches_recipe(weight_quantizer: Quantizer | None, recipe: Recipe, name: str) -> None:
    """Raise if a weight quantized at construction cannot be used under ``recipe``.

    Recipes with a factory mix formats by design: for them it is the GEMM that sees whether operands fit.
    """
    if weight_quantizer is None or recipe.custom():
        return
    compatible = weight_quantizer._get_compatible_recipe()
    if not isinstance(recipe, compatible):
        raise RuntimeError(
            f"Recipe mismatch: {name} was quantized by {type(weight_quantizer).__name__}, for {compatible.__name__}, "
            f"and cannot be used under {type(recipe).__name__}: give quantized_model_init and autocast the same "
            "recipe, or convert the weights with crossgrain.requantize_(model, recipe)"
        )
