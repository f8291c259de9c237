"""Decide which tensors stay in memory because something else holds them anyway, such as parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensor import QuantizedTensorStorage

_marked: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
_purge_at = 1024


def mark_not_offload(*tensors: Any) -> None:
    """Exclude tensors, and everything that shares their memory, from offloading.

    Args:
        *tensors: plain or quantized tensors; None is ignored.

    Raises:
        TypeError: an argument is not a tensor.

    Examples:
        >>> weight = torch.randn(256, 256)
        >>> cg.mark_not_offload(weight)
        >>> with cg.offload("host", min_bytes=0):
        ...     y = (torch.ones(1, 256, requires_grad=True) @ weight).sum()
        >>> y.backward()
    """
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            mark_not_offload(*(buffer for _, buffer in tensor._buffers()))
        elif isinstance(tensor, Tensor) and tensor.layout is torch.strided:  # others stay in any case
            reference = StorageWeakRef(tensor.untyped_storage())
            _marked[reference.cdata] = reference
        elif tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"mark_not_offload takes tensors, got {type(tensor).__name__}")
    _purge()


def stays_in_memory(tensor: Any) -> bool:
    """Whether offloading the tensor would free no memory.

    Modules hold their parameters, and the graph holds the leaves that require a gradient.
    """
    if not isinstance(tensor, Tensor):
        return False
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return True
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in _marked


def _purge() -> None:
    """From time to time, remove the entries of tensors that no longer exist."""
    global _purge_at
    if len(_marked) < _purge_at:
        return
    for address in [address for address, reference in _marked.items() if reference.expired()]:
        del _marked[address]
    _purge_at = max(1024, 2 * len(_marked))
