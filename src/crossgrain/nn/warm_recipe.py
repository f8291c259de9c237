"""Compile the CPU kernels that a recipe needs, by training layers with it: its first step then waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kernels.warmup import Step
from ..recipe.base import Recipe
from ..recipe.context import autocast
from ..recipe.gemm_recipe import GemmRecipe
from ..recipe.rules import Glob, Rule
from ..recipe.schedule import RecipeSchedule
from .grouped_linear import GroupedLinear
from .linear import Linear

# Scales of the small layer have padding. Results of the large one are written past the caches, by other kernels.
_SMALL, _LARGE = 160, 1024
_DTYPES = (torch.float32, torch.bfloat16)


def warm_up_for(recipe: Recipe | RecipeSchedule) -> Iterator[Step]:
    """Compile what linear layers, and those of experts, need with a recipe. Before each step, yield what it is.

    All rules and phases are tried, whatever the names of layers are. Attention is left out: its kernels are compiled
    when it is first used.
    """
    every = [(label, each, dtype) for label, each in _variants(recipe) for dtype in _DTYPES]
    for number, (label, each, dtype) in enumerate(every):
        yield Step(f"{label}, {str(dtype).removeprefix('torch.')}", number, len(every))
        _train(each, dtype)


def _variants(recipe: Recipe | RecipeSchedule) -> list[tuple[str, Recipe]]:
    """The recipe of layers without rules, and of layers under each rule or phase."""
    if not isinstance(recipe, GemmRecipe | RecipeSchedule):
        return [("all layers", recipe)]
    base = recipe.base if isinstance(recipe, RecipeSchedule) else recipe.with_rules(())
    found: list[tuple[str, Recipe]] = [("all layers", base)]
    for rule in recipe.rules:
        found.append((rule.pattern, base.with_rules([Rule(Glob(("*",)), rule.settings)])))
    return found


def _train(recipe: Recipe, dtype: torch.dtype) -> None:
    """A step of layers of all kinds. torch's random numbers are as they were after it."""
    with torch.enable_grad(), torch.random.fork_rng(devices=()):
        for size in (_SMALL, _LARGE):
            layer = Linear(size, size, device="cpu", params_dtype=dtype)
            x = torch.ones(size, size, dtype=dtype, device="cpu", requires_grad=True)
            with autocast(recipe=recipe):
                y = layer(x)
            y.sum().backward()
        experts = GroupedLinear(2, _SMALL, _SMALL, device="cpu", params_dtype=dtype)
        x = torch.ones(_SMALL, _SMALL, dtype=dtype, device="cpu", requires_grad=True)
        with autocast(recipe=recipe):
            y = experts(x, [0, _SMALL])  # experts without rows are decoded, where others are multiplied by their codes
        y.sum().backward()
