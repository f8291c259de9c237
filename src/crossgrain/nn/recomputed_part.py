"""Parts of a module that are computed again in backward instead of keeping what they computed on the way."""

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
    """``compute(*args)``; in backward again, with the random numbers and the scales of the first time.

    ``state`` is what ``compute`` quantizes by, if it does; ``tracker`` has random states beside torch's generator.
    """

    def run(*args: Any) -> Result:
        with nullcontext() if state is None else forward_part(state):
            return compute(*args)

    tracked = None if tracker is None else lambda: tracker
    result: Result = checkpoint(run, *args, use_reentrant=False, get_rng_state_tracker=tracked)
    return result
