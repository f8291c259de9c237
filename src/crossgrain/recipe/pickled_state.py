"""Extra states that Transformer Engine has pickled.

Loading a pickle can run any code, so crossgrain never does, whatever the environment says. If the recipe keeps no
histories, the pickle holds nothing that is needed and is ignored; otherwise it is refused.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from . import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Transformer Engine's environment variable that allows unpickling; it has no effect here."""


class CheckpointExtraStatePolicy(enum.Enum):
    """What is done with a pickled extra state: ignore it, or refuse it."""

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
    """Return False: pickles are never loaded."""
    return False


def passes_over(extra: Any, recipe: Recipe | None) -> bool:
    """Whether ``extra`` can be ignored: there is none, or it is a pickle and the recipe keeps no histories."""
    if _stands_for_nothing(extra):
        return True
    is_pickle = isinstance(extra, Tensor) and extra.dtype == torch.uint8 and extra.numel() > 0
    known = CheckpointExtraStatePolicy.REFUSE if recipe is None else _RECIPE_POLICIES.get(type(recipe))
    return is_pickle and known is CheckpointExtraStatePolicy.PASS_OVER


def _stands_for_nothing(extra: Any) -> bool:
    """Whether this is the marker of `torch.distributed.checkpoint.state_dict` for an extra state that is not there."""
    kind = type(extra)
    return (kind.__module__, kind.__name__) == ("torch.distributed.checkpoint.state_dict", "_EXTRA_STATE")
