"""fp32 GEMMs in fp32: TF32, which keeps 10 bits of each factor, is off inside of a block.

torch can only switch TF32 for the whole process. Threads that are inside at the same time share the change: the first
one makes it, the last one takes it back. GEMMs of other threads may meanwhile be in full fp32, never in less than they
asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_fp32() -> Iterator[None]:
    """A context manager in which fp32 GEMMs of GPUs do not use TF32. If it is off anyway, this costs one read."""
    global _inside, _restore
    with _lock:
        switched = _inside > 0 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        if switched and _inside == 0:
            _restore = _switched_off()
        _inside += switched
    try:
        yield
    finally:
        with _lock:
            _inside -= switched
            if _inside == 0 and _restore is not None:
                _restore()
                _restore = None


def _switched_off() -> Callable[[], None]:
    """Switch TF32 off, and return what switches it on again in the way in which it was on.

    torch has an old and a new interface, and reading the old one raises RuntimeError after both were mixed. So the
    interface that was used is used again.
    """
    matmul = torch.backends.cuda.matmul
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was switched on by the new interface
        before = "highest"
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(before)
    matmul.fp32_precision = "ieee"

    def restore() -> None:
        matmul.fp32_precision = "none"  # for what follows torch.backends.fp32_precision
        if matmul.fp32_precision != "tf32":
            matmul.fp32_precision = "tf32"

    return restore
