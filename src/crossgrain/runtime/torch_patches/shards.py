"""Whether ``torch.distributed`` is cutting a parameter into shards just now.

Why: a piece of a quantized tensor that cuts through a block is decoded, which is what someone who reads it wants. A
shard of a parameter would silently be in high precision, or be rounded a second time. Nothing but the call stack tells
the two apart.

Seen with torch 2.13. If a torch cuts shards elsewhere, nothing is found, and the piece is decoded as any other.
"""

from __future__ import annotations

from .stack import is_running

_PACKAGES = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")


def is_cutting_shards() -> bool:
    """Whether code of FSDP2 or DTensor is on the call stack, which is walked: for rare cuts only."""
    return is_running(*_PACKAGES)
