"""Parts of a module that are computed again in backward instead of keeping what they computed on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from ..recipe import RecipeState

Result = TypeVar("Result")


def recomputed(
    compute: Callable[..., Result], *args: Any, state: RecipeState | None = None, tracker: Any = None
) -> Result:
    """``compute(*args)``; in backward again, with the random numbers and the scales of the first time.

    torch restores its own generator. ``tracker`` has further random states; ``state`` has the scales of delayed
    scaling, if there are any.
    """
    contexts = (nullcontext(), _Replay(state, tracker))
    result: Result = checkpoint(compute, *args, use_reentrant=False, context_fn=lambda: contexts)
    return result


class _Replay:
    """Inside, all is as it was when this was made, and nothing that happens there leaves a trace.

    May be entered again: a graph that is kept can run backward more than once.
    """

    def __init__(self, state: RecipeState | None, tracker: Any) -> None:
        self._delayed = None if state is None else state.delayed
        self._scale = None if self._delayed is None else self._delayed.scale.clone()
        self._tracker = tracker
        self._random_states = None if tracker is None else tracker.get_states()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            if self._tracker is not None:
                stack.callback(self._tracker.set_states, self._tracker.get_states())
                self._tracker.set_states(self._random_states)
            if self._delayed is not None and self._scale is not None:
                stack.enter_context(self._delayed.replaying(self._scale))
            self._undo = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
