"""Patch two functions of torch.distributed that take lists of tensors, so that they recognise quantized tensors.

Why: most collectives are operations of torch, for which a tensor subclass can say what to do. Two functions are not.
``_broadcast_coalesced``, which DistributedDataParallel calls first, concatenates decoded numbers; a quantized tensor
would be quantized again from them, its columns from its rows. ``_check_tensor_list``, which scatter, gather and others
call, accepts lists whose memory is read afterwards, but a quantized tensor has no memory of its own. Both are replaced
by functions that treat all other tensors as before.

Tested with torch 2.13. If torch has no such functions, `install` warns, and the warning says what not to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..logs import warn


class ListHandler(Protocol):
    """What to do with tensors of one class."""

    @property
    def tensor_class(self) -> type[Tensor]:
        """The class of the tensors that it handles."""

    def refusal(self, name: str, tensor: Any) -> Exception:
        """The error for a collective that does not support such a tensor."""

    def bytes_to_broadcast(self, tensors: Sequence[Any], group: Any) -> list[Tensor]:
        """Plain tensors with the memory to broadcast, after a check that all ranks can."""

    def note_received(self, tensors: Sequence[Any]) -> None:
        """Called after the bytes have been received."""


installed = False
"""Whether `install` was called, successfully or not."""


def install(handler: ListHandler) -> None:
    """Replace both functions of torch. Only the first call has an effect."""
    global installed
    if installed:
        return
    installed = True
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    broadcast = getattr(dist, "_broadcast_coalesced", None)
    check = getattr(distributed_c10d, "_check_tensor_list", None)
    if broadcast is None or check is None:
        _warn_that_it_does_not_fit()
        return
    dist._broadcast_coalesced = _broadcasting(broadcast, handler)  # type: ignore[attr-defined]
    distributed_c10d._check_tensor_list = _checking(check, handler)


def _broadcasting(torchs: Callable[..., None], handler: ListHandler) -> Callable[..., None]:
    def _broadcast_coalesced(group: Any, tensors: list[Tensor], buffer_size: int, src: int = 0) -> None:
        quantized = [tensor for tensor in tensors if isinstance(tensor, handler.tensor_class)]
        if not quantized:
            torchs(group, tensors, buffer_size, src)
            return
        others = [tensor for tensor in tensors if not isinstance(tensor, handler.tensor_class)]
        torchs(group, [*others, *handler.bytes_to_broadcast(quantized, group)], buffer_size, src)
        handler.note_received(quantized)

    return _broadcast_coalesced


def _checking(torchs: Callable[..., None], handler: ListHandler) -> Callable[..., None]:
    def _check_tensor_list(param: Any, param_name: str) -> None:
        torchs(param, param_name)
        for tensor in param:
            if isinstance(tensor, handler.tensor_class):
                raise handler.refusal(f"a collective with the list {param_name}", tensor)

    return _check_tensor_list


def _warn_that_it_does_not_fit() -> None:
    warn(
        __name__,
        f"cannot patch torch {torch.__version__}, which has other functions for lists of tensors. Do not "
        "wrap quantized parameters in DistributedDataParallel, and do not pass quantized tensors to scatter, gather or "
        "other collectives that take lists: their bytes would change, or invalid memory would be read.",
    )
