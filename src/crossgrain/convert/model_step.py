"""Make every call of a converted model one step of delayed scaling.

Delayed scaling updates its scales when an autocast ends. A converted model needs no autocast, so a call of the model is
the step instead. Two hooks on the model begin and end it. A layer that is called several times in one call of the model
still has one step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..recipe import one_step
from ..recipe.model_calls import ModelCall, begin_call, end_call, leave_abandoned_calls


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
    leave_abandoned_calls()
    step = one_step()
    step.__enter__()
    begin_call(ModelCall(model, sys._getframe(1), step, sys.exception()))


def _end(model: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        end_call(model)
