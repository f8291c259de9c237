"""Save quantized tensors for backward as plain buffers, so that saved-tensor hooks see them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .storage import QuantizedTensorStorage


class SavedBefore(NamedTuple):
    """A tensor that appears a second time. Its buffers are saved only once."""

    holder: QuantizedTensorStorage


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """Take the buffers out of quantized tensors, to pass them to ``ctx.save_for_backward``.

    Args:
        *tensors: quantized tensors or storages, plain tensors or None.

    Returns:
        A flat list of plain tensors, and a list of objects for `restore_from_saved`.

    Examples:
        >>> q = cg.quantize(torch.ones(32, 32), "mxfp8")
        >>> buffers, objects = cg.prepare_for_saving(q, torch.ones(2))
        >>> len(buffers), len(objects)
        (5, 2)
        >>> restored, plain = cg.restore_from_saved(objects, buffers)
        >>> restored.dequantize().sum()
        tensor(1024.)
    """
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


def restore_from_saved(tensors: list[Any], saved_tensors: Any, return_saved_tensors: bool = False) -> Any:
    """Put saved buffers back into their tensors: the inverse of `prepare_for_saving`.

    Args:
        tensors: the second result of `prepare_for_saving`.
        saved_tensors: the saved tensors.
        return_saved_tensors: also return the saved tensors that are left over.

    Returns:
        The tensors that were passed to `prepare_for_saving`; with ``return_saved_tensors`` a pair.

    Examples:
        >>> q = cg.quantize(torch.ones(32, 32), "mxfp8")
        >>> buffers, objects = cg.prepare_for_saving(q, torch.ones(2))
        >>> restored, plain = cg.restore_from_saved(objects, buffers)
        >>> restored.dequantize().sum()
        tensor(1024.)
    """
    rest = list(saved_tensors)
    restored: list[Any] = []
    for holder in tensors:
        if holder is None:
            restored.append(rest.pop(0))
        elif isinstance(holder, SavedBefore):
            restored.append(holder.holder)
        else:
            rest = holder.restore_from_saved(rest)
            restored.append(holder)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` with ``ctx.tensor_objects`` and ``ctx.saved_tensors``. The objects are removed from ``ctx``.

    Args:
        ctx: the context of an autograd function.
        return_saved_tensors: as in `restore_from_saved`.

    Returns:
        As `restore_from_saved`.

    Raises:
        AttributeError: ``ctx.tensor_objects`` is not set.

    Examples:
        >>> from types import SimpleNamespace
        >>> buffers, objects = cg.prepare_for_saving(cg.quantize(torch.ones(32, 32), "mxfp8"))
        >>> ctx = SimpleNamespace(tensor_objects=objects, saved_tensors=buffers)  # of an autograd.Function
        >>> (q,) = cg.restore_from_func_ctx(ctx)
        >>> q.dequantize().sum()
        tensor(1024.)
    """
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx.tensor_objects must be set to the objects of prepare_for_saving")
    restored = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return restored
