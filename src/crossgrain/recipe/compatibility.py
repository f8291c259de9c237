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

# The recipe whose weights a quantizer of each class makes. All other quantizers come from factories.
Quantizer._compatible_recipe = CustomRecipe
Float8Quantizer._compatible_recipe = DelayedScaling
Float8CurrentScalingQuantizer._compatible_recipe = Float8CurrentScaling
MXFP8Quantizer._compatible_recipe = MXFP8BlockScaling
Float8BlockQuantizer._compatible_recipe = Float8BlockScaling
NVFP4Quantizer._compatible_recipe = NVFP4BlockScaling


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
