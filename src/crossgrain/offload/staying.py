"""Tensors that stay in memory because others hold them anyway, known by their storage: aliases count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensor import QuantizedTensorStorage

_marked: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
_purge_at = 1024


def mark_not_offload(*tensors: Any) -> None:
    """Never offload these tensors, plain or quantized, nor any alias of them."""
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            mark_not_offload(*(buffer for _, buffer in tensor._buffers()))
        elif isinstance(tensor, Tensor) and tensor.layout is torch.strided:  # others stay in any case
            reference = StorageWeakRef(tensor.untyped_storage())
            _marked[reference.cdata] = reference
        elif tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"mark_not_offload takes tensors, not {type(tensor).__name__}")
    _purge()


def stays_in_memory(tensor: Any) -> bool:
    """Whether storing the tensor would free nothing.

    The graph itself holds leaves that want a gradient, where it adds to it; modules hold parameters.
    """
    if not isinstance(tensor, Tensor):
        return False
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return True
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in _marked


def _purge() -> None:
    """Forget the dead ones now and then: the dictionary stays of the size of what lives."""
    global _purge_at
    if len(_marked) < _purge_at:
        return
    for address in [address for address, reference in _marked.items() if reference.expired()]:
        del _marked[address]
    _purge_at = max(1024, 2 * len(_marked))
