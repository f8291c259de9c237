"""Extra states that others have pickled, under the names of the field.

A pickle is a program, so none is ever run here, whatever the environment says: where a recipe keeps no
state there is nothing in it to be missed, and it is passed over; where it does, it is refused.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from . import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Allows unpickling elsewhere; it has no effect here."""


class CheckpointExtraStatePolicy(enum.Enum):
    """What becomes of a pickled extra state."""

    PASS_OVER = "pass_over"
    REFUSE = "refuse"


_RECIPE_POLICIES: dict[type[Recipe], CheckpointExtraStatePolicy] = {
    DelayedScaling: CheckpointExtraStatePolicy.REFUSE,
    Float8CurrentScaling: CheckpointExtraStatePolicy.PASS_OVER,
    MXFP8BlockScaling: CheckpointExtraStatePolicy.PASS_OVER,
    Float8BlockScaling: CheckpointExtraStatePolicy.PASS_OVER,
    NVFP4BlockScaling: CheckpointExtraStatePolicy.PASS_OVER,
}


def should_load_extra_state_pickle(*args: Any, **kwargs: Any) -> bool:
    """Never."""
    return False


def passes_over(extra: Any, recipe: Recipe | None) -> bool:
    """Whether ``extra`` is nothing at all, or a pickle that a module with this recipe needs nothing of."""
    if _stands_for_nothing(extra):
        return True
    is_pickle = isinstance(extra, Tensor) and extra.dtype == torch.uint8 and extra.numel() > 0
    known = CheckpointExtraStatePolicy.REFUSE if recipe is None else _RECIPE_POLICIES.get(type(recipe))
    return is_pickle and known is CheckpointExtraStatePolicy.PASS_OVER


def _stands_for_nothing(extra: Any) -> bool:
    """What `torch.distributed.checkpoint.state_dict` puts where a full state dict has no extra state."""
    kind = type(extra)
    return (kind.__module__, kind.__name__) == ("torch.distributed.checkpoint.state_dict", "_EXTRA_STATE")
