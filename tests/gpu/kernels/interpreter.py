"""Triton's interpreter, without two of its errors, and with a check of every address: it has none of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from crossgrain.kernels.triton.launch import launch

_cast = interpreter._convert_float
_memory = interpreter._interpreter


def correct() -> None:
    """Let casts from bf16 to fp32 be exact, maxima skip all NaNs, and accesses be checked in `checked_launch`.

    The cast of Triton 3.6 to 3.9 gives wrong numbers for subnormal ones.
    """
    interpreter._convert_float = _exact_cast
    interpreter._interpreter = _CheckedMemory


def checked_launch(kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
    """A launcher that raises IndexError if a kernel reads or writes outside of the storages of its arguments."""
    _CheckedMemory.allow([each for each in arguments.values() if isinstance(each, torch.Tensor)])
    launch(kernel, programs, device, warps, arguments)


def _exact_cast(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source == tl.bfloat16 and target == tl.float32:
        return np.ascontiguousarray(numbers).view(np.uint16).astype(np.uint32) << 16
    return _cast(numbers, source, target, rounding)


class _OnlyChecked(type):
    """All names of the interpreter's own memory, but for those that `_CheckedMemory` has."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(_memory, name)


class _CheckedMemory(metaclass=_OnlyChecked):
    """What the interpreter calls to read and write memory."""

    _begins = np.zeros(0, np.uint64)
    _ends = np.zeros(0, np.uint64)

    @classmethod
    def allow(cls, tensors: list[torch.Tensor]) -> None:
        """Only the storages of these tensors may be accessed."""
        storages = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in tensors)})
        cls._begins = np.array([begin for begin, _ in storages], np.uint64)
        cls._ends = np.array([end for _, end in storages], np.uint64)

    @classmethod
    def _checked(cls, addresses: Any, mask: Any, size: int) -> Any:
        """The mask as bools, which Triton 3.9 wants and does not always make itself."""
        mask = mask.astype(bool)
        used = addresses[mask].astype(np.uint64)
        place = np.searchsorted(cls._begins, used, side="right")
        wrong = (place == 0) | (used + np.uint64(size) > cls._ends[place - 1])
        if wrong.any():
            raise IndexError(f"{int(wrong.sum())} of {len(used)} addresses are outside of all arguments")
        return mask

    @classmethod
    def load(cls, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        mask = cls._checked(addresses, mask, np.dtype(dtype).itemsize)
        loaded = _memory.load(addresses, mask, other, dtype)
        if loaded.dtype == np.float32:  # numpy's maxima skip quiet NaNs only; those of GPUs skip signalling ones, too
            loaded.view(np.uint32)[np.isnan(loaded)] |= 1 << 22
        return loaded

    @classmethod
    def store(cls, addresses: Any, value: Any, mask: Any) -> Any:
        mask = cls._checked(addresses, mask, value.dtype.itemsize)
        return _memory.store(addresses, value, mask)

    @classmethod
    def atomic_rmw(cls, operation: Any, addresses: Any, value: Any, mask: Any, semantic: Any) -> Any:
        mask = cls._checked(addresses, mask, value.dtype.itemsize)
        return _memory.atomic_rmw(operation, addresses, value, mask, semantic)
