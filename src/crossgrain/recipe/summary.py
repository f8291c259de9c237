"""The formats of a layer in a few words, for reports and for ``print(model)``."""

from __future__ import annotations

from ..gemm.operands import GEMMS
from .base import Recipe
from .gemm_recipe import GemmRecipe

HIGH_PRECISION = "hp"


def formats_in_short(recipe: Recipe, name: str, module_type: str = "linear") -> str:
    """The formats that a recipe gives a layer, such as ``mxfp8`` or ``fprop mxfp8, dgrad nvfp4(sr) x nvfp4, ...``.

    Args:
        recipe: the recipe. Of one that is not a `GemmRecipe`, it is the name of its class.
        name: name of the layer.
        module_type: type of the layer.
    """
    if not isinstance(recipe, GemmRecipe):
        return type(recipe).__name__
    try:
        chosen = recipe.layer_formats(name, module_type)
    except ValueError:  # a rule is for blocks, and the recipe was not bound to a model
        return str(recipe)
    by_gemm: dict[str, str] = {}
    for gemm, operands in GEMMS.items():
        if gemm != "fprop" and recipe.backward_override is not None:
            by_gemm[gemm] = HIGH_PRECISION
            continue
        texts = [str(chosen.format(gemm, tensor).value) for tensor in operands]
        by_gemm[gemm] = texts[0] if texts[0] == texts[1] else " x ".join(texts)
    if len(set(by_gemm.values())) == 1:
        return by_gemm["fprop"]
    return ", ".join(f"{gemm} {text}" for gemm, text in by_gemm.items())
