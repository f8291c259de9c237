"""Whether ``torch.distributed.checkpoint`` is loading just now.

Why: it loads a tensor by ``copy_``, which for tensors of different formats decodes the one and rounds its numbers a
second time. A user who copies means that; one who loads a checkpoint into a model of another format mostly does not,
and would not notice. Nothing but the call stack tells the two apart.

Seen with torch 2.13. If a torch loads from elsewhere, nothing is found, and the copy is made as any other.
"""

from __future__ import annotations

from .stack import is_running

_PACKAGE = "torch.distributed.checkpoint"


def is_loading() -> bool:
    """Whether code of ``torch.distributed.checkpoint`` is on the call stack, which is walked: for rare copies only."""
    return is_running(_PACKAGE)
