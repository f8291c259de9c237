"""Workspaces: memory for decoded operands that is reused, instead of being allocated for every GEMM.

Each thread has a few buffers by name ("gemm.a", "gemm.b"). A buffer grows to the largest operand that it has held. Its
content is valid until the same thread asks for the same name again.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

LIMIT_BYTES = 1 << 30  # larger operands are allocated for each GEMM: keeping their memory would cost too much


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.bytes: Tensor | None = None  # of `lend`


_buffers = _Buffers()


def workspace(name: str, elements: int) -> Tensor | None:
    """A float32 buffer of at least ``elements`` numbers on the CPU; None if it would be larger than the limit."""
    if elements * 4 > LIMIT_BYTES:
        return None
    buffer = _buffers.by_name.get(name)
    if buffer is None or buffer.numel() < elements:
        with torch.inference_mode(False):
            buffer = torch.empty(elements, dtype=torch.float32, device="cpu")
        _buffers.by_name[name] = buffer
    return buffer


def lend(size: int) -> Tensor:
    """At least ``size`` bytes on the CPU, until `give_back`.

    Nobody else gets them meanwhile: the handler of a signal, which may run a layer in the same thread, gets others.
    Memory that is not given back, because of an exception, is freed with its tensor.
    """
    memory, _buffers.bytes = _buffers.bytes, None
    if memory is None or memory.numel() < size:
        with torch.inference_mode(False):
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory


def give_back(memory: Tensor) -> None:
    """Give back what `lend` has lent, for the next who asks."""
    _buffers.bytes = memory


def free_workspaces() -> None:
    """Free the buffers of this thread."""
    _buffers.by_name.clear()
    _buffers.bytes = None
