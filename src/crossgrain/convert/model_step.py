"""A converted model needs no autocast, which says where a step of delayed scaling ends; so its own call is the step.

Two hooks on the model open and end it. A layer that the model calls several times then sees one step, not several.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..recipe import one_step
from ..recipe.context import leave_abandoned_steps


class _Call(NamedTuple):
    """Of a model: its step, and the frame that made it, by which an abandoned call is known.

    ``handled``  the exception that was being handled around it, which is none of the call's
    """

    model: nn.Module
    frame: FrameType
    step: AbstractContextManager[None]
    handled: BaseException | None


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("crossgrain_model_calls", default=())


def step_with_calls(model: nn.Module) -> None:
    """Make every call of ``model`` a step, if no larger one is under way."""
    model.register_forward_pre_hook(_open, prepend=True)
    model.register_forward_hook(_end, always_call=True)


def forget_calls(model: nn.Module) -> None:
    """Undo `step_with_calls`."""
    for hooks, ours in ((model._forward_pre_hooks, _open), (model._forward_hooks, _end)):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            model._forward_hooks_always_called.pop(key, None)


def _open(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return  # each layer in a graph is a step of its own
    _leave_abandoned()
    step = one_step()
    step.__enter__()
    _calls.set((*_calls.get(), _Call(model, sys._getframe(1), step, sys.exception())))


def _end(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    calls = _calls.get()
    if not calls or calls[-1].model is not model:
        return
    _calls.set(calls[:-1])
    # torch calls this hook for a call that failed as well, in itself or in another hook, while it handles the error.
    failed = sys.exception() is not calls[-1].handled
    _leave(calls[-1], *(sys.exc_info() if failed else (None, None, None)))


def _leave(call: _Call, *error: Any) -> None:
    try:
        call.step.__exit__(*error)
    except BaseException as raised:
        if raised is not error[1]:
            raise


def _leave_abandoned() -> None:
    """Calls that ended without their hook, by KeyboardInterrupt, are no part of anything."""
    calls = _calls.get()
    running = set()
    frame: FrameType | None = sys._getframe(1) if calls else None
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    while calls and calls[-1].frame not in running:
        interrupted = KeyboardInterrupt()
        _leave(calls[-1], KeyboardInterrupt, interrupted, None)
        calls = calls[:-1]
    _calls.set(calls)


leave_abandoned_steps.append(_leave_abandoned)
