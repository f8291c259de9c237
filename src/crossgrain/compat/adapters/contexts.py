"""The autocast of clients of Transformer Engine, in which layers treat NaNs and infinities as they do there."""

from __future__ import annotations

import warnings
from typing import Any

from ...recipe import context
from ...recipe.context import RecipeLike


class autocast(context.autocast):
    """`crossgrain.autocast`, in which layers saturate infinities, unless their recipe says something else."""

    _nonfinite = "saturate"


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: RecipeLike = None, fp8_group: Any = None
) -> autocast:
    """The old name of `autocast`; it is deprecated."""
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)
