"""Saving quantized tensors for backward: as raw buffers, which saved-tensor hooks can see."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .storage import QuantizedTensorStorage


class SavedBefore(NamedTuple):
    """A holder that was among the tensors already: its buffers are saved once."""

    holder: QuantizedTensorStorage


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """A flat list of plain tensors for ``save_for_backward``, and the objects to put them back into."""
    flat: list[Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if any(tensor is earlier for earlier in objects if earlier is not None):
            objects.append(SavedBefore(tensor))
        elif isinstance(tensor, QuantizedTensorStorage):
            buffers, tensor = tensor.prepare_for_saving()
            flat.extend(buffers)
            objects.append(tensor)
        else:
            flat.append(tensor)
            objects.append(None)
    return flat, objects


def restore_from_saved(objects: list[Any], saved: Any, return_saved_tensors: bool = False) -> Any:
    """The inverse of `prepare_for_saving`; with ``return_saved_tensors`` also what was left over."""
    rest = list(saved)
    restored: list[Any] = []
    for holder in objects:
        if holder is None:
            restored.append(rest.pop(0))
        elif isinstance(holder, SavedBefore):
            restored.append(holder.holder)
        else:
            rest = holder.restore_from_saved(rest)
            restored.append(holder)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` from ``ctx.tensor_objects`` and ``ctx.saved_tensors``; the objects are let go."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx.tensor_objects must be set to the objects of prepare_for_saving")
    restored = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return restored
