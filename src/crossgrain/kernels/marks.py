"""Mark NaNs and infinities of the input in planes whose codes do not show them.

Most formats lose some of them, by their definition: FP4 has no NaN and stores 6, FP8 stores its largest number for an
infinity. A mark is a NaN that the format does have: the NaN of the element, or else the NaN of the block's scale (E4M3
or E8M0), or else of the only scale. Whatever reads the plane gets NaN there: GEMMs, other ranks, checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from ..planes import Plane
from ..planes.groups import PlaneGroups
from .backend import Seen
from .choice import backend_for
from .reference.marks import loses_nonfinite

__all__ = ["loses_nonfinite", "mark_nonfinite", "mark_nonfinite_in_groups"]


def mark_nonfinite(x: Tensor, plane: Plane, seen: Seen = None) -> None:
    """Make the NaNs and infinities of ``x`` that ``plane`` does not show decode to NaN.

    Args:
        x: the matrix.
        plane: the plane that was encoded from it. With a mark in a scale, all numbers of its block are NaN.
        seen: what `encode` has returned.
    """
    if loses_nonfinite(plane.format):
        backend_for(plane.data.device.type).mark(x, plane, seen)


def mark_nonfinite_in_groups(x: Tensor, planes: PlaneGroups, seen: Seen = None) -> None:
    """`mark_nonfinite` for the planes of groups of rows."""
    if loses_nonfinite(planes.format):
        backend_for(planes.data.device.type).mark_groups(x, planes, seen)
