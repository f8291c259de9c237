"""Workspaces: memory for decoded operands that is reused, instead of being allocated for every GEMM.

Each thread has a few buffers by name ("gemm.a", "gemm.b"). A buffer grows to the largest operand that it has held. Its
content is valid until the same thread asks for the same name again, in the same block `own_workspaces`.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..runtime.transforms import dispatch_modes, memory_is_out_of_reach

LIMIT_BYTES = 1 << 30  # larger operands are allocated for each GEMM: keeping their memory would cost too much


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # blocks `own_workspaces` that this thread is in
        self.by_name: dict[tuple[int, str], Tensor] = {}


_buffers = _Buffers()


def workspace(name: str, elements: int) -> Tensor | None:
    """A float32 buffer of at least ``elements`` numbers on the CPU; None if it would be larger than the limit.

    There is none either where tensors are fake, or where operations are recorded, which would record the buffer.
    """
    if elements * 4 > LIMIT_BYTES or (dispatch_modes() and memory_is_out_of_reach()):
        return None
    key = _buffers.depth, name
    buffer = _buffers.by_name.get(key)
    if buffer is None or buffer.numel() < elements:
        with torch.inference_mode(False):
            buffer = torch.empty(elements, dtype=torch.float32, device="cpu")
        _buffers.by_name[key] = buffer
    return buffer


class _OwnWorkspaces:
    """A block whose workspaces nobody else gets: the handler of a signal, which may run a layer in it, gets others."""

    def __enter__(self) -> None:
        _buffers.depth += 1

    def __exit__(self, *error: object) -> None:
        _buffers.depth -= 1
        if _buffers.depth:  # of a handler: what it has used is not needed again
            for key in [key for key in _buffers.by_name if key[0] > _buffers.depth]:
                _buffers.by_name.pop(key, None)


own_workspaces = _OwnWorkspaces()


def free_workspaces() -> None:
    """Free the buffers of this thread."""
    _buffers.by_name.clear()
