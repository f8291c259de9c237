"""Attention that is computed again in backward instead of keeping its scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...recipe import RecipeState


def recomputed(compute: Callable[[], Tensor], state: RecipeState | None, tracker: Any) -> Tensor:
    """``compute()``; in backward again, with the random numbers and the scales of the first time.

    torch restores its own generator. ``tracker`` has further states; ``state`` has the scales of delayed scaling.
    """
    states = None if tracker is None else tracker.get_states()
    delayed = None if state is None else state.delayed
    scale = None if delayed is None else delayed.scale.clone()
    again = False

    def run() -> Tensor:
        nonlocal again
        first, again = not again, True
        with ExitStack() as stack:
            if not first:
                if tracker is not None:
                    stack.callback(tracker.set_states, tracker.get_states())
                    tracker.set_states(states)
                if delayed is not None and scale is not None:
                    stack.enter_context(delayed.replaying(scale))
            return compute()

    result: Tensor = checkpoint(run, use_reentrant=False)
    return result
