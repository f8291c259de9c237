"""Find out which activation checkpoints of torch the running code is part of.

``torch.utils.checkpoint`` has no interface that says whether code runs for the first time or is recomputed. But its
functions are on the call stack, and have the object that represents one use of a checkpoint in both passes:

    not reentrant   a ``_CheckpointFrame``: ``checkpoint`` runs the first pass, an ``unpack_hook`` the second
    reentrant       the ``ctx`` of ``CheckpointFunction``: ``forward`` runs the first pass, ``backward`` the second

If a version of torch does not have these functions, no checkpoints are found, and callers that need them raise.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class Running(NamedTuple):
    """The checkpoints that the running code is part of.

    Attributes:
        first: checkpoints whose first pass this is, innermost first; in a recomputation, those that it has started.
        again: the checkpoint that is recomputed; None if there is none.
        run: which of its recomputations this is: a graph that is kept may have several.
        reentrant: whether ``again`` is reentrant.
        trains: a backward pass will follow, although gradients are disabled in the first pass of a reentrant
            checkpoint.
    """

    first: list[Any]
    again: Any = None
    run: Hashable = None
    reentrant: bool = False
    trains: bool = False


NOTHING = Running([])


def in_backward() -> bool:
    """Whether the autograd engine runs the current code, in this thread."""
    return torch._C._current_graph_task_id() != -1


def running_checkpoints() -> Running:
    """Find the running checkpoints on the call stack. Ask `passes` first whether there may be some, which is faster."""
    known = _functions()
    first: list[Any] = []
    trains = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        function = known.get(frame.f_code)
        if function == "reentrant again":
            run = torch._C._current_graph_task_id()
            return Running(first, frame.f_locals["ctx"], run, reentrant=True, trains=trains)
        if function == "again":
            return Running(first, frame.f_locals["frame"], frame.f_locals["gid"], trains=trains)
        if function == "reentrant first":
            context = frame.f_locals["ctx"]
            first.append(context)
            trains = trains or bool(context.next_functions)  # empty if no input requires gradients
        elif function == "first":
            first.extend(_frame_of(frame.f_locals.get("gen")))
        elif function == "engine":
            break  # the code that called backward is not part of the pass
        frame = frame.f_back
    return Running(first, trains=trains) if first else NOTHING


def _frame_of(generator: Any) -> list[Any]:
    """The ``_CheckpointFrame`` of a checkpoint. Without gradients there is none: it only calls its function."""
    paused = getattr(generator, "gi_frame", None)
    return [paused.f_locals["new_frame"]] if paused is not None and "new_frame" in paused.f_locals else []


def unseen_by_policies() -> AbstractContextManager[Any]:
    """A context manager in which selective checkpoints do not see operations, in both passes.

    Selective checkpoints count operations to find the results that they kept. The operations by which a module
    quantizes are not the same in both passes, and many of them are kernels that write to memory unseen by torch.
    """
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING_TO_HIDE
    there: Any = torch.utils.checkpoint
    selective = (there._CachingTorchDispatchMode, there._CachedTorchDispatchMode)
    found = any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if found else _NOTHING_TO_HIDE


_NOTHING_TO_HIDE = nullcontext()


@cache
def _functions() -> dict[CodeType, str]:
    there: Any = torch.utils.checkpoint
    try:
        function, hook = there.CheckpointFunction, there._checkpoint_hook
        (unpack,) = (
            code
            for code in hook.__init__.__code__.co_consts
            if isinstance(code, CodeType) and code.co_name == "unpack_hook"
        )
        return {
            inspect.unwrap(there.checkpoint).__code__: "first",
            unpack: "again",
            inspect.unwrap(function.forward).__code__: "reentrant first",
            inspect.unwrap(function.backward).__code__: "reentrant again",
            torch.autograd.graph._engine_run_backward.__code__: "engine",
        }
    except (AttributeError, ValueError):
        return {}
