"""Recipes of all kinds, for runs on the device."""

from collections.abc import Callable

from crossgrain import recipe as recipes
from crossgrain.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    "fp8": recipes.Float8CurrentScaling,
    "fp8_line": lambda: recipes.as_recipe("all: fp8(e5m2)"),  # its quantizers come from a factory
    "fp8_delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "fp8_block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,  # rotation, stochastic rounding, 2d weights
    "hybrid": lambda: recipes.as_recipe("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"),
    "delayed_hybrid": lambda: recipes.as_recipe("fprop: fp8(delayed), dgrad: mxfp8, wgrad: mxfp8"),
    "mxfp4": lambda: recipes.as_recipe("mxfp4"),
    "mxfp6": lambda: recipes.as_recipe("mxfp6_e2m3"),
    "2d": lambda: recipes.as_recipe("fprop: mxfp8_2d, dgrad: mxfp8_2d, wgrad: mxfp8"),
    "row_scaled": lambda: recipes.as_recipe("fprop: nvfp4_row_scaled, dgrad: mxfp8, wgrad: hp"),
    "hp": lambda: recipes.as_recipe("hp"),
}
SOME = ("fp8", "fp8_delayed", "mxfp8", "nvfp4", "hybrid", "delayed_hybrid")
