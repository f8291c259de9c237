"""Which recipes can use a weight that is kept quantized."""

from __future__ import annotations

import warnings

from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer
from ..runtime.callers import levels_to_caller
from .base import Recipe
from .blockwise import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from .custom import CustomRecipe
from .gemm_recipe import GemmRecipe
from .per_tensor import DelayedScaling, Float8CurrentScaling

# The recipe class that makes weights with each quantizer class. All other quantizers come from factories.
Quantizer._compatible_recipe = CustomRecipe
Float8Quantizer._compatible_recipe = DelayedScaling
Float8CurrentScalingQuantizer._compatible_recipe = Float8CurrentScaling
MXFP8Quantizer._compatible_recipe = MXFP8BlockScaling
Float8BlockQuantizer._compatible_recipe = Float8BlockScaling
NVFP4Quantizer._compatible_recipe = NVFP4BlockScaling


def check_weight_matches_recipe(weight_quantizer: Quantizer | None, recipe: Recipe, name: str) -> None:
    """Check that a weight which was quantized when its module was created can be used with a recipe.

    Recipes with a factory may mix formats, so they are not checked here: the GEMM checks its operands.

    Args:
        weight_quantizer: the quantizer of the weight; None if it is not kept quantized.
        recipe: the recipe that the module is about to use.
        name: name of the weight, for the message.

    Raises:
        RuntimeError: the weight is in the format of another recipe class.

    Examples:
        >>> quantizer = cg.quantizer_for("mxfp8")
        >>> cg.recipe.check_weight_matches_recipe(quantizer, cg.recipe.MXFP8BlockScaling(), "fc1.weight")
    """
    if weight_quantizer is None or recipe.custom():
        return
    compatible = weight_quantizer._get_compatible_recipe()
    if not isinstance(recipe, compatible):
        raise RuntimeError(
            f"Recipe mismatch for {name}: it was quantized by {type(weight_quantizer).__name__}, for "
            f"{compatible.__name__}, and cannot be used with {type(recipe).__name__}. Pass the same recipe to "
            "quantized_model_init and autocast, or convert the weights with crossgrain.requantize_(model, recipe)"
        )


def warn_of_another_recipe(before: Recipe | None, now: Recipe, name: str) -> None:
    """Warn if a module that ran with one class of recipe is about to run with another.

    Recipes by GEMM say all their formats, and are meant to be tried one after the other: nothing is said about them.

    Args:
        before: the recipe that the module used last; None if there was none.
        now: the recipe that it will use.
        name: name of the module, for the message.

    Examples:
        >>> recipe = cg.recipe.MXFP8BlockScaling()
        >>> cg.recipe.warn_of_another_recipe(recipe, recipe, "fc1")  # nothing is said: it is the same one
    """
    if before is None or isinstance(now, type(before)) or isinstance(before, type(now)):
        return
    if isinstance(before, GemmRecipe) or isinstance(now, GemmRecipe):
        return
    # By `warnings`, as Transformer Engine does, because programs for it catch this one there.
    warnings.warn(
        f"{name}: Recipe type changed from {type(before).__name__} to {type(now).__name__}. Its tensors have other "
        "formats from now on; scales and histories of delayed scaling are kept for a later return. If that was not "
        "meant, use one recipe for the model",
        stacklevel=levels_to_caller(),
    )
