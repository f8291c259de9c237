"""Calls of models that are steps of their own, and how a call that was interrupted is known.

A model without an autocast around it is called, and its call is the step (`convert.model_step` has the hooks). An
interrupt can end a call without its hooks: such an abandoned call is found by its frame, which is no longer running,
and is left before anything else joins its step.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple


class ModelCall(NamedTuple):
    """A call that is a step.

    ``model``    what was called
    ``frame``    the frame that made the call
    ``step``     the context manager that was entered for it
    ``handled``  the exception that was being handled around the call, which is none of the call's own
    """

    model: Any
    frame: FrameType
    step: AbstractContextManager[None]
    handled: BaseException | None


_calls: ContextVar[tuple[ModelCall, ...]] = ContextVar("crossgrain_model_calls", default=())


def begin_call(call: ModelCall) -> None:
    """Remember a call whose step has been entered."""
    _calls.set((*_calls.get(), call))


def end_call(model: Any) -> None:
    """Leave the step of the innermost call, if it is a call of ``model``.

    torch runs the hook that calls this for a call that failed as well, while it handles the error.
    """
    calls = _calls.get()
    if not calls or calls[-1].model is not model:
        return
    _calls.set(calls[:-1])
    failed = sys.exception() is not calls[-1].handled
    _leave(calls[-1], *(sys.exc_info() if failed else (None, None, None)))


def leave_abandoned_calls() -> None:
    """Abort the steps of calls that ended without their hook, by KeyboardInterrupt."""
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
