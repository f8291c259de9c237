"""Calls of models that are steps of delayed scaling, and how interrupted calls are found.

A converted model that is called outside of an autocast is one step (`convert.model_step` has the hooks). A
KeyboardInterrupt can end a call without running its hooks. Such an abandoned call is recognised by its frame, which no
longer runs, and its step is ended before anything else joins it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple


class ModelCall(NamedTuple):
    """A call of a model that is a step.

    Attributes:
        model: what was called.
        frame: the frame that made the call.
        step: the context manager that was entered for the call.
        handled: the exception that was being handled when the call was made: it is not an error of the call.
    """

    model: Any
    frame: FrameType
    step: AbstractContextManager[None]
    handled: BaseException | None


_calls: ContextVar[tuple[ModelCall, ...]] = ContextVar("crossgrain_model_calls", default=())


def begin_call(call: ModelCall) -> None:
    """Record a call whose step has been entered."""
    _calls.set((*_calls.get(), call))


def end_call(model: Any) -> None:
    """Exit the step of the innermost call, if it is a call of ``model``.

    The hook that calls this also runs for a call that failed, while torch handles the error.
    """
    calls = _calls.get()
    if not calls or calls[-1].model is not model:
        return
    _calls.set(calls[:-1])
    failed = sys.exception() is not calls[-1].handled
    _leave(calls[-1], *(sys.exc_info() if failed else (None, None, None)))


def leave_abandoned_calls() -> None:
    """Abort the steps of calls that a KeyboardInterrupt ended without their hook."""
    calls = _calls.get()
    running = set()
    frame: FrameType | None = sys._getframe(1) if calls else None
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    while calls and calls[-1].frame not in running:
        _leave(calls[-1], KeyboardInterrupt, KeyboardInterrupt(), None)
        calls = calls[:-1]
    _calls.set(calls)


def _leave(call: ModelCall, *error: Any) -> None:
    try:
        call.step.__exit__(*error)
    except BaseException as raised:
        if raised is not error[1]:
            raise
