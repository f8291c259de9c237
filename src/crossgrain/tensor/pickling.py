"""Pickle quantized tensors, so that ``torch.load(weights_only=True)`` can read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from .tensor import QuantizedTensor


def reduce_tensor(tensor: QuantizedTensor) -> tuple[Any, ...]:
    """``__reduce_ex__`` of every quantized tensor: its class and its state."""
    tensor._check_fresh()
    if tensor._cut_axes:
        tensor = tensor._clone()  # a slice is saved without the rest of its buffers
    return make_tensor, (type(tensor), tensor._plain_state(), tensor.requires_grad, tensor._is_param)


def make_tensor(
    cls: type[QuantizedTensor], state: dict[str, Any], requires_grad: bool, is_param: bool
) -> QuantizedTensor:
    """Rebuild a pickled tensor.

    Raises:
        TypeError: ``cls`` is not a class of quantized tensors.
        ValueError: the state does not have the fields of the class, or its buffers do not fit.
    """
    if QuantizedTensorStorage not in getattr(cls, "__mro__", ()):
        raise TypeError(f"{cls!r} is not a class of quantized tensors")
    if set(state) != set(cls._state_names()):
        raise ValueError(
            f"the pickled state of a {cls.__name__} has other fields than this version of crossgrain: unknown are "
            f"{sorted(set(state) - set(cls._state_names()))}, missing are "
            f"{sorted(set(cls._state_names()) - set(state))}"
        )
    device = next((value.device for value in state.values() if isinstance(value, torch.Tensor)), torch.device("cpu"))
    tensor = cls._wrapper(state["_shape"], state["_dtype"], device, requires_grad)
    tensor._take_plain_state(state)
    for plane in tensor.planes():
        plane.check_buffers()
    if is_param:
        tensor._is_param = True
    return tensor
