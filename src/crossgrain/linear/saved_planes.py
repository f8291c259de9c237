"""Operands saved for backward: raw buffers for autograd, which hooks and offloading see, and a light note.

A note holds no memory and is not used up: a graph that is kept can run backward again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..formats import Format
from ..planes import Direction, Plane

BUFFERS_PER_OPERAND = 3

Operand = Plane | Tensor


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


class Unchanged:
    """Notices in-place writes to operands that are kept beyond the graph, where autograd no longer looks."""

    def __init__(self, *operands: Operand) -> None:
        buffers = [buffer for operand in operands for buffer in _buffers(operand)]
        self._seen = [(buffer, buffer._version) for buffer in buffers if not buffer.is_inference()]

    def check(self, layer: str) -> None:
        if any(buffer._version != version for buffer, version in self._seen):
            raise RuntimeError(
                f"{layer}: a tensor that the weight gradient needs was changed in place before backward_dw() was called"
            )


def _buffers(operand: Operand) -> list[Tensor]:
    return list(operand.buffers()) if isinstance(operand, Plane) else [operand]
