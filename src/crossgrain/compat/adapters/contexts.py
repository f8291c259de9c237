"""The autocast of clients of Transformer Engine, in which layers treat NaNs and infinities as they do there."""

from __future__ import annotations

import warnings
from typing import Any, Self

from ...recipe import context, get_default_recipe
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
