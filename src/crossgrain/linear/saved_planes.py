"""Save operands for backward: plain buffers for autograd, which hooks and offloading see, and notes.

A note says how to read the buffers. It has no memory and is not used up, so backward can run several times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..formats import Format
from ..offload.staying import mark_not_offload
from ..planes import ROWWISE, Direction, Plane
from ..runtime.derivatives import entrances
from ..runtime.settings import settings
from ..tensor import QuantizedTensor
from .call import LinearCall, Needs
from .padding import Sizes
from .weight_gradient import dummy_weight_gradient

BUFFERS_PER_OPERAND = 3  # codes, scales and amax

Operand = Plane | Tensor


class KeptInput(NamedTuple):
    """What is saved of x for wgrad; ``is_part`` if it has only the rows of this rank."""

    operand: Operand
    is_part: bool = False


class PlaneNote(NamedTuple):
    """Everything about a plane except its buffers."""

    format: Format
    direction: Direction
    shape: tuple[int, int]
    transposed: bool


def buffers_and_note(operand: Operand | None) -> tuple[tuple[Tensor | None, ...], PlaneNote | None]:
    """The buffers for ``save_for_backward``, and the note that is kept in the graph."""
    if not isinstance(operand, Plane):
        return (operand, None, None), None
    if operand.stale:
        operand.check_fresh()  # autograd checks the buffers from here on
    note = PlaneNote(operand.format, operand.direction, operand.shape, operand.transposed)
    return (operand.data, operand.scale, operand.amax), note


def restored_operand(buffers: tuple[Tensor | None, ...], note: PlaneNote | None) -> Operand | None:
    """The operand, from its buffers and its note."""
    data, scale, amax = buffers
    if note is None or data is None:
        return data
    return Plane(note.format, note.direction, note.shape, data, scale, amax, note.transposed)


class Saved(NamedTuple):
    """Everything that backward needs from forward."""

    x: KeptInput | None
    w: Operand | None
    x_given: Tensor
    weight: Tensor
    bias: Tensor | None
    sizes: Sizes
    padded: Sizes


def save(ctx: Any, saved: Saved, call: LinearCall, needs: Needs) -> None:
    """Save buffers with autograd, and everything else in ``ctx``."""
    kept = saved.x
    x_buffers, ctx.x_note = buffers_and_note(None if kept is None else kept.operand)
    w_buffers, ctx.w_note = buffers_and_note(saved.w)
    if _weight_outlives_graph(saved.weight, call):
        mark_not_offload(*w_buffers)
    ctx.save_for_backward(*x_buffers, *w_buffers)
    if not (saved.x_given.is_leaf and saved.weight.is_leaf):
        ctx.entrances = entrances(saved.x_given, saved.weight, saved.bias)
    ctx.shared_weight, ctx.weight_dtype = None, saved.weight.dtype
    if isinstance(saved.w, Plane) and saved.w.direction is ROWWISE and not settings.strict:  # it is made late
        ctx.shared_weight = call.quantized_weight  # which keeps the columns that backward makes
    call.quantized_weight = None  # backward has its plane; only the cache keeps the copy
    call.quantized_input = None
    ctx.call, ctx.needs, ctx.sizes, ctx.padded = call, needs, saved.sizes, saved.padded
    ctx.x_shape, ctx.x_dtype = saved.x_given.shape, saved.x_given.dtype
    ctx.x_is_part = kept is not None and kept.is_part
    ctx.weight = None
    if needs.dw:  # for a weight that consists of parts, backward needs only the shape
        ctx.weight = saved.weight if call.weight_parts is None else dummy_weight_gradient(saved.weight)
    ctx.bias_dtype = None if saved.bias is None else saved.bias.dtype


def _weight_outlives_graph(weight: Tensor, call: LinearCall) -> bool:
    """Whether the saved buffers of the weight belong to a parameter or to the cache, and so stay in memory anyway."""
    if call.weight is not None and not isinstance(weight, QuantizedTensor):
        return call.quantized_weight is not None
    return (weight if weight._base is None else weight._base).is_leaf


class Restored(NamedTuple):
    """The operands that forward has saved."""

    x: KeptInput
    w: Operand


def restored(ctx: Any) -> Restored:
    """The operands that `save` has saved; None for those that are not needed. Autograd raises if one was changed."""
    saved = ctx.saved_tensors
    x: Any = restored_operand(saved[:BUFFERS_PER_OPERAND], ctx.x_note)
    w: Any = restored_operand(saved[BUFFERS_PER_OPERAND:], ctx.w_note)
    return Restored(KeptInput(x, ctx.x_is_part), w)
