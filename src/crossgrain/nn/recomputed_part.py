"""Recompute a part of a module in backward instead of keeping its intermediate results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from ..recipe import RecipeState, forward_part
from .activation_checkpoint import checkpoint

Result = TypeVar("Result")


def recomputed(
    compute: Callable[..., Result], *args: Any, state: RecipeState | None = None, tracker: Any = None
) -> Result:
    """Return ``compute(*args)``; backward calls it again with the same random numbers and scales.

    Args:
        compute: the function.
        *args: its arguments.
        state: state of the recipe that ``compute`` quantizes with, if it does.
        tracker: tracker of random states besides torch's generator.
    """

    def run(*args: Any) -> Result:
        with nullcontext() if state is None else forward_part(state):
            return compute(*args)

    tracked = None if tracker is None else lambda: tracker
    result: Result = checkpoint(run, *args, use_reentrant=False, get_rng_state_tracker=tracked)
    return result
