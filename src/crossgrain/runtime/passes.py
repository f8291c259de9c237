"""What a pass that is computed again in backward takes from the first one, so that it gives the same bits.

Each checkpoint has a `Tape`, which lives as long as the object that torch keeps for it. The first pass notes there
what would be another thing later: the recipe in force, scales of delayed scaling, seeds, cached weights. The second
takes them from there in the same order. Checkpoints may be nested and recomputed in any order, more than once, or
never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from typing import Any, TypeVar

import torch

from .torch_patches.checkpoint_frames import NOTHING, Running, running_checkpoints, unseen_by_policies

Value = TypeVar("Value")
_ATTRIBUTE = "_crossgrain_tape"


class Tape:
    """The notes of one checkpoint.

    ``outside``        the precision context it was entered in
    ``backward_step``  of the backward pass that it belongs to, if it was made in one
    """

    def __init__(self, outside: Any) -> None:
        self.outside = outside
        self.backward_step: Any = None
        self._notes: dict[Hashable, list[Any]] = {}
        self._taken: dict[Hashable, Counter[Hashable]] = {}

    def note(self, key: Hashable, value: Any) -> None:
        self._notes.setdefault(key, []).append(value)

    def take(self, key: Hashable, run: Hashable) -> Any:
        """The next note in this recomputation."""
        notes, taken = self._notes.get(key, []), self._taken.setdefault(run, Counter())
        if taken[key] == len(notes):
            raise _unknown(f"has only {len(notes)} of what is asked for now for the time {len(notes) + 1}")
        taken[key] += 1
        return notes[taken[key] - 1]


class Pass:
    """What the running code is part of: first passes of some checkpoints, perhaps inside a recomputation of one."""

    def __init__(self, running: Running, outside: Any) -> None:
        self.recomputes = running.again is not None
        self.reentrant = running.reentrant
        self.replayed: Tape | None = getattr(running.again, _ATTRIBUTE, None)
        self.recorded = [_tape_of(checkpoint, outside) for checkpoint in running.first]
        self._run = running.run
        self._trains = running.trains

    @property
    def trains(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() or self._trains

    @property
    def hides_gradients(self) -> bool:
        """Whether they are off only because this is the first pass of a reentrant checkpoint."""
        return self._trains and not self.recomputes

    def beyond(self, outer: Pass) -> Pass:
        """Without what ``outer``, which this is inside of, is part of as well."""
        rest = copy(self)
        rest.recomputes = self.recomputes and not outer.recomputes
        rest.recorded = [tape for tape in self.recorded if tape not in outer.recorded]
        return rest

    def same(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What ``make`` gives; in a recomputation what it gave in the first pass."""
        if not self.recomputes:
            value = make()
        elif self.replayed is None:
            raise _unknown("was not seen")
        else:
            value = self.replayed.take(key, self._run)
        for tape in self.recorded:
            tape.note(key, value)
        return value


_PLAIN = Pass(NOTHING, None)
_current: ContextVar[Pass] = ContextVar("crossgrain_pass", default=_PLAIN)


def find_pass(outside: Any) -> Pass:
    """The pass that is running. ``outside`` is the precision context in force, noted by checkpoints that are new."""
    running = running_checkpoints()
    return _PLAIN if running is NOTHING else Pass(running, outside)


def replayed_tape() -> Tape | None:
    """The notes of the checkpoint that is being recomputed."""
    tape: Tape | None = getattr(running_checkpoints().again, _ATTRIBUTE, None)
    return tape


def current_pass() -> Pass:
    """The pass of the module that is running."""
    return _current.get()


def within(this: Pass) -> AbstractContextManager[None]:
    """Makes it the `current_pass`. Policies of selective checkpoints see nothing of what is inside."""
    return _NOTHING_NEW if this is _current.get() else _within(this)


_NOTHING_NEW = nullcontext()


@contextmanager
def _within(this: Pass) -> Iterator[None]:
    token = _current.set(this)
    try:
        with unseen_by_policies():
            yield
    finally:
        _current.reset(token)


def same_seed(draw: Callable[[], int]) -> int:
    """A seed from torch's generator; in a recomputation that of the first pass, wherever the generator is.

    If the generator was restored, it goes on as in the first pass, which dropout needs. If it was not, it is left
    alone, so that backward draws what it would have drawn.
    """
    this = _current.get()
    if not this.recomputes or this.replayed is None:
        seed = draw()
        for tape in this.recorded:
            tape.note(draw, seed)
        return seed
    before = torch.get_rng_state()
    drawn = draw()
    seed = this.same(draw, lambda: drawn)
    if seed != drawn:
        torch.set_rng_state(before)
    return seed


def _tape_of(checkpoint: Any, outside: Any) -> Tape:
    tape = getattr(checkpoint, _ATTRIBUTE, None)
    if tape is None:
        tape = Tape(outside)
        setattr(checkpoint, _ATTRIBUTE, tape)
    return tape


def _unknown(why: str) -> RuntimeError:
    return RuntimeError(
        f"a checkpoint is computed again in backward, and its first pass {why}: it has to run the same modules in the "
        "same order both times, under crossgrain.checkpoint or torch.utils.checkpoint.checkpoint"
    )
