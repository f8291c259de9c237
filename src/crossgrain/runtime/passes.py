"""Activation checkpoints: what a recomputation in backward takes from the first pass, so that it gives the same bits.

Each checkpoint has a `Tape`, which exists as long as torch's object for the checkpoint. The first pass records there
what could be different later: the active recipe, scales of delayed scaling, seeds, cached weights. A recomputation
reads them in the same order. Checkpoints may be nested, and recomputed in any order, several times, or never.
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
    """The values that the first pass of one checkpoint has recorded.

    Attributes:
        outside: the precision context in which the checkpoint was entered.
        backward_step: the step of the backward pass that the checkpoint belongs to, if it was made in one.
    """

    def __init__(self, outside: Any) -> None:
        self.outside = outside
        self.backward_step: Any = None
        self._notes: dict[Hashable, list[Any]] = {}
        self._taken: dict[Hashable, Counter[Hashable]] = {}

    def note(self, key: Hashable, value: Any) -> None:
        """Record a value."""
        self._notes.setdefault(key, []).append(value)

    def take(self, key: Hashable, run: Hashable) -> Any:
        """The next recorded value of ``key`` in the recomputation ``run``.

        Raises:
            RuntimeError: the recomputation has already read all values.
        """
        notes, taken = self._notes.get(key, []), self._taken.setdefault(run, Counter())
        if taken[key] == len(notes):
            raise _unknown(f"its first pass recorded {len(notes)} values, but recomputation asked for one more")
        taken[key] += 1
        return notes[taken[key] - 1]


class Pass:
    """Which checkpoints the running code is part of: first passes of some, perhaps inside a recomputation of another.

    Attributes:
        recomputes: the code runs in a recomputation.
        reentrant: that recomputation is of a reentrant checkpoint.
        replayed: the tape of the checkpoint that is recomputed; None if it has none.
        recorded: the tapes of the checkpoints whose first pass this is.
    """

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
        """Whether gradients are disabled only because this is the first pass of a reentrant checkpoint."""
        return self._trains and not self.recomputes

    def beyond(self, outer: Pass) -> Pass:
        """This pass without the checkpoints that ``outer``, a pass around it, is also part of."""
        rest = copy(self)
        rest.recomputes = self.recomputes and not outer.recomputes
        rest.recorded = [tape for tape in self.recorded if tape not in outer.recorded]
        return rest

    def same(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result of ``make``; in a recomputation its result in the first pass.

        Raises:
            RuntimeError: the first pass recorded no such value.
        """
        if not self.recomputes:
            value = make()
        elif self.replayed is None:
            raise _unknown("its first pass recorded nothing")
        else:
            value = self.replayed.take(key, self._run)
        for tape in self.recorded:
            tape.note(key, value)
        return value


_PLAIN = Pass(NOTHING, None)
_current: ContextVar[Pass] = ContextVar("crossgrain_pass", default=_PLAIN)


def find_pass(outside: Any) -> Pass:
    """The pass that is running. ``outside`` is the active precision context, which new checkpoints record."""
    if _hooks(True) is None and torch.is_grad_enabled() and _graph_task() == -1:
        return _PLAIN  # checkpoints have saved-tensor hooks, disable gradients, or run in backward
    running = running_checkpoints()
    return _PLAIN if running is NOTHING else Pass(running, outside)


_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id  # -1 outside of backward


def replayed_tape() -> Tape | None:
    """The tape of the checkpoint that is being recomputed; None if there is none."""
    tape: Tape | None = getattr(running_checkpoints().again, _ATTRIBUTE, None)
    return tape


def current_pass() -> Pass:
    """The pass of the module that is running."""
    return _current.get()


def within(this: Pass) -> AbstractContextManager[None]:
    """A context manager that makes a pass the `current_pass`. Selective checkpoints do not see operations inside."""
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
    """A seed from torch's generator; in a recomputation the seed of the first pass, whatever the generator's state is.

    If the checkpoint has restored the generator, it advances as in the first pass, which dropout needs. If not, the
    generator stays as it is, so that backward draws the same numbers as without a recomputation.
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


def same_value(key: Hashable, make: Callable[[], Value]) -> Value:
    """The result of ``make``; in a recomputation its result in the first pass, if that was recorded."""
    this = _current.get()
    return make() if this.recomputes and this.replayed is None else this.same(key, make)


def _tape_of(checkpoint: Any, outside: Any) -> Tape:
    tape = getattr(checkpoint, _ATTRIBUTE, None)
    if tape is None:
        tape = Tape(outside)
        setattr(checkpoint, _ATTRIBUTE, tape)
    return tape


def _unknown(why: str) -> RuntimeError:
    return RuntimeError(
        f"a checkpoint is recomputed in backward, and {why}. It must run the same modules in the same order both "
        "times, with crossgrain.checkpoint or torch.utils.checkpoint.checkpoint"
    )
