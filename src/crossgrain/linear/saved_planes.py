"""Operands saved for backward: raw buffers for autograd, which hooks and offloading see, and a light note.

A note holds no memory and is not used up: a graph that is kept can run backward again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..formats import Format
from ..offload.staying import mark_not_offload
from ..planes import Direction, Plane
from ..tensor import QuantizedTensor
from .call import LinearCall, Needs
from .padding import Sizes
from .weight_gradient import dummy_weight_gradient

BUFFERS_PER_OPERAND = 3

Operand = Plane | Tensor


class KeptInput(NamedTuple):
    """What wgrad needs of x; ``is_part``: only this rank's rows of it."""

    operand: Operand
    is_part: bool = False


class PlaneNote(NamedTuple):
    """All of a plane but its buffers."""

    format: Format
    direction: Direction
    shape: tuple[int, int]
    transposed: bool


def buffers_and_note(operand: Operand | None) -> tuple[tuple[Tensor | None, ...], PlaneNote | None]:
    """What goes to ``save_for_backward``, and what stays with the graph."""
    if not isinstance(operand, Plane):
        return (operand, None, None), None
    operand.check_fresh()  # from here on autograd watches the buffers
    note = PlaneNote(operand.format, operand.direction, operand.shape, operand.transposed)
    return (operand.data, operand.scale, operand.amax), note


def restored_operand(buffers: tuple[Tensor | None, ...], note: PlaneNote | None) -> Operand | None:
    """The operand again."""
    data, scale, amax = buffers
    if note is None or data is None:
        return data
    return Plane(note.format, note.direction, note.shape, data, scale, amax, note.transposed)


class Saved(NamedTuple):
    """All that backward needs of forward."""

    x: KeptInput | None
    w: Operand | None
    x_given: Tensor
    weight: Tensor
    bias: Tensor | None
    sizes: Sizes
    padded: Sizes


def save(ctx: Any, saved: Saved, call: LinearCall, needs: Needs) -> None:
    """Planes and tensors go to autograd, all else to ``ctx``."""
    kept = saved.x
    x_buffers, ctx.x_note = buffers_and_note(None if kept is None else kept.operand)
    w_buffers, ctx.w_note = buffers_and_note(saved.w)
    if _weight_outlives_graph(saved.weight, call):
        mark_not_offload(*w_buffers)
    ctx.save_for_backward(*x_buffers, *w_buffers)
    call.quantized_weight = None  # backward has its plane; the copy belongs to the cache alone
    call.quantized_input = None
    ctx.call, ctx.needs, ctx.sizes, ctx.padded = call, needs, saved.sizes, saved.padded
    ctx.x_shape, ctx.x_dtype = saved.x_given.shape, saved.x_given.dtype
    ctx.x_is_part = kept is not None and kept.is_part
    ctx.weight = None
    if needs.dw:  # of a weight that was put together backward asks the shape alone
        ctx.weight = saved.weight if call.weight_parts is None else dummy_weight_gradient(saved.weight)
    ctx.bias_dtype = None if saved.bias is None else saved.bias.dtype


def _weight_outlives_graph(weight: Tensor, call: LinearCall) -> bool:
    """Whether what is saved of the weight belongs to a parameter or to the cache."""
    if call.weight is not None and not isinstance(weight, QuantizedTensor):
        return call.quantized_weight is not None
    return (weight if weight._base is None else weight._base).is_leaf


class Restored(NamedTuple):
    """The operands that forward kept."""

    x: KeptInput
    w: Operand


def restored(ctx: Any) -> Restored:
    """What `save` has saved; raises if it was changed in place since. Operands that are not needed are None."""
    saved = ctx.saved_tensors
    x: Any = restored_operand(saved[:BUFFERS_PER_OPERAND], ctx.x_note)
    w: Any = restored_operand(saved[BUFFERS_PER_OPERAND:], ctx.w_note)
    return Restored(KeptInput(x, ctx.x_is_part), w)
