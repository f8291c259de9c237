"""Make every call of a converted model one step of delayed scaling.

Delayed scaling updates its scales when an autocast ends. A converted model needs no autocast, so a call of the model is
the step instead. Two hooks on the model begin and end it. A layer that is called several times in one call of the model
still has one step.
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
    """A call of a model that is running.

    Attributes:
        model: the model.
        frame: the frame that made the call, to detect a call that was abandoned.
        step: the context of its step.
        handled: the exception that was being handled when the call began, which does not belong to the call.
    """

    model: nn.Module
    frame: FrameType
    step: AbstractContextManager[None]
    handled: BaseException | None


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("crossgrain_model_calls", default=())


def step_with_calls(model: nn.Module) -> None:
    """Make every call of ``model`` a step, unless it is part of a larger step."""
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
    """Remove calls that ended without their hook, as with KeyboardInterrupt."""
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
