"""Pickle quantized tensors, so that ``torch.load(weights_only=True)`` can read them."""

from __future__ import annotations

import math
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
    try:
        tensor = cls._wrapper(state["_shape"], state["_dtype"], device, requires_grad)
        tensor._take_plain_state(state)
        _check(tensor)
    except Exception as error:  # a state that somebody has changed can be anything
        raise ValueError(
            f"the pickled state of a {cls.__name__} does not fit together: {type(error).__name__}: {error}"
        ) from error
    if is_param:
        tensor._is_param = True
    return tensor


def _check(tensor: QuantizedTensor) -> None:
    """Raise if the buffers, the shape and the formats of an unpickled tensor do not fit together."""
    if tensor._quantizer is not None and not hasattr(tensor._quantizer, "check_writable"):
        raise TypeError(f"its quantizer is a {type(tensor._quantizer).__name__}")
    for plane in tensor.planes():
        plane.check_buffers()
        if plane.format.element is not None:
            plane.operand_codes(), plane.operand_scales()  # buffers that lie in memory in another way than they should
        blocks_differ = plane.format.block is not None and tensor.dim() > 1 and tensor.shape[-1] != plane.shape[1]
        if math.prod(plane.shape) != tensor.numel() or blocks_differ:
            raise ValueError(
                f"its shape {list(tensor.shape)} is not that of its {plane.direction.value} plane, {list(plane.shape)}"
            )
