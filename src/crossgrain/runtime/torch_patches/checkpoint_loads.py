"""Whether ``torch.distributed.checkpoint`` is loading just now.

Why: it loads a tensor by ``copy_``, which for tensors of different formats decodes the one and rounds its numbers a
second time. A user who copies means that; one who loads a checkpoint into a model of another format mostly does not,
and would not notice. Nothing but the call stack tells the two apart.

Seen with torch 2.13. If a torch loads from elsewhere, nothing is found, and the copy is made as any other.
"""

from __future__ import annotations

import sys
from types import FrameType

_PACKAGE = "torch.distributed.checkpoint"


def is_loading() -> bool:
    """Whether code of ``torch.distributed.checkpoint`` is on the call stack, which is walked: for rare copies only."""
    if _PACKAGE not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False
