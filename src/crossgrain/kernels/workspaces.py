"""Memory for decoded operands that is used again, instead of being asked of the system for every GEMM.

Each thread has a few named buffers ("a", "b"); a buffer grows to the largest operand it has held. What
is decoded into it is good until the same name is asked for again on the same thread.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

LIMIT_BYTES = 1 << 30  # larger operands get memory of their own


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}


_buffers = _Buffers()


def workspace(name: str, elements: int) -> Tensor | None:
    """An fp32 buffer of at least ``elements`` on the CPU, or None if that would be beyond the limit."""
    if elements * 4 > LIMIT_BYTES:
        return None
    buffer = _buffers.by_name.get(name)
    if buffer is None or buffer.numel() < elements:
        with torch.inference_mode(False):
            buffer = torch.empty(elements, dtype=torch.float32, device="cpu")
        _buffers.by_name[name] = buffer
    return buffer


def free_workspaces() -> None:
    """Give the buffers of this thread back."""
    _buffers.by_name.clear()
