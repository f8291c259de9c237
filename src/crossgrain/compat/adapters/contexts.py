"""Contexts of clients of Transformer Engine: infinities saturate as they do there, 4-bit weights can get masters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from ...recipe import as_recipe, context, get_default_recipe
from ...recipe.context import RecipeLike
from ...recipe.global_state import refuse_graphs
from ..environment import warn_about_ignored, with_attention_of_environment


class autocast(context.autocast):
    """`crossgrain.autocast`, in which layers saturate infinities, unless their recipe says something else.

    Entering it reads the environment variables of Transformer Engine that change numbers. ``_graph`` must be
    False.
    """

    _nonfinite = "saturate"

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: RecipeLike = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        refuse_graphs(_graph)
        super().__init__(enabled, calibrating, recipe, amax_reduction_group)

    def __enter__(self) -> Self:
        if self._enabled or self._calibrating:
            asked = get_default_recipe() if self._recipe is None else self._recipe
            warn_about_ignored(asked)
            recipe = with_attention_of_environment(asked)
            if recipe is not asked:
                self._recipe = recipe
        return super().__enter__()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: RecipeLike = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """The old name of `autocast`; it is deprecated."""
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: RecipeLike = None, preserve_high_precision_init_val: bool | None = None
) -> Iterator[None]:
    """The old name of `quantized_model_init`; it is deprecated.

    Args:
        enabled: as there.
        recipe: as there.
        preserve_high_precision_init_val: as there. If it is not given, initial values are preserved for NVFP4 and
            custom recipes, unless gradients are off. Megatron-core does not give it for FP4 parameters
            (``get_fp4_context``), and then reads the values wherever a parameter has them.
    """
    # stacklevel 3: one level for the generator and one for contextlib, so that the warning names the caller's line.
    warnings.warn("fp8_model_init is deprecated: use quantized_model_init", DeprecationWarning, stacklevel=3)
    preserve = bool(preserve_high_precision_init_val)
    if preserve_high_precision_init_val is None and enabled:
        chosen = get_default_recipe() if recipe is None else as_recipe(recipe)
        preserve = torch.is_grad_enabled() and (chosen.nvfp4() or chosen.custom())
    with context.quantized_model_init(enabled, recipe, preserve):
        yield
