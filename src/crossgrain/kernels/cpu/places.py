"""Addresses of inputs and planes for kernels: numbers, or arrays with one number for each group of rows.

Arithmetic is the same for numbers and arrays, so encoders work for a tensor and for groups.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from ...planes.groups import PlaneGroups
from ..target import GroupedTarget, Target

Ints = Any  # an int, or an array of them


@dataclass(frozen=True, eq=False)
class GroupsAsOne(Target):
    """A target that stands for several groups: the plane is that of the largest group, by which kernels are chosen.

    ``amax`` and ``scale`` are those of all groups.
    """

    groups: PlaneGroups | None = None

    def as_groups(self) -> GroupedTarget:
        assert self.groups is not None
        return GroupedTarget(self.groups, self.encoding, self.amax, self.scale, self.within)


def as_one(target: GroupedTarget) -> GroupsAsOne:
    planes = target.planes
    highest = max(range(len(planes.heights)), key=planes.heights.__getitem__)
    return GroupsAsOne(planes.planes[highest], target.encoding, target.amax, target.scale, target.within, planes)


def groups_of(target: Target) -> PlaneGroups | None:
    return target.groups if isinstance(target, GroupsAsOne) else None


def buffers_of(target: Target) -> Plane | PlaneGroups:
    """The buffers of a target: its plane, or the planes of all groups."""
    return groups_of(target) or target.plane


class Place(NamedTuple):
    """Addresses, and distances in bytes from one row of an operand to the next."""

    height: Ints
    x: Ints
    codes: Ints
    codes_step: Ints
    scales: Ints
    scales_step: Ints


def place_of(target: Target, x: Tensor) -> Place:
    plane, groups = target.plane, getattr(target, "groups", None)
    assert plane.scale is not None
    if groups is None:
        scale = plane.scale
        step = scale.stride(0) * scale.element_size() if scale.dim() else 0
        codes_step = plane.data.numel() // max(plane.shape[1 if plane.transposed else 0], 1)
        return Place(plane.shape[0], x.data_ptr(), plane.data.data_ptr(), codes_step, scale.data_ptr(), step)
    bits = 8 if plane.format.element is None else plane.format.element.bits
    heights = np.array(groups.heights)
    size = groups.scale.element_size()
    return Place(
        heights,
        x.data_ptr() + starts(heights) * (groups.width * x.element_size()),
        groups.data.data_ptr() + starts([math.prod(shape.data) for shape in groups.shapes]),
        (heights if groups.transposed else groups.width) * bits // 8,
        groups.scale.data_ptr() + starts([math.prod(shape.scale) for shape in groups.shapes]) * size,
        np.array([shape.scale[-1] * size for shape in groups.shapes]),
    )


def starts(sizes: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The start of each of several parts of ``sizes`` that follow each other."""
    ends = np.cumsum(sizes)
    return ends - sizes


class Numbers:
    """fp32 numbers that a kernel reads: an array for a few (a tensor would take microseconds), or a tensor.

    With ``sizes``, the number of values of each group, ``address`` is an array with one address for each group.
    """

    __slots__ = ("address", "memory")

    def __init__(self, memory: Tensor | array[float], sizes: Sequence[int] | None = None) -> None:
        self.memory = memory  # kept alive
        self.address: Ints = memory.buffer_info()[0] if isinstance(memory, array) else memory.data_ptr()
        if sizes is not None:
            self.address = self.address + starts(sizes) * 4

    def for_each_of(self, rows: int) -> Numbers:
        """One number for each row, from one for all rows."""
        if len(self.memory) == rows:
            return self
        if isinstance(self.memory, array):
            return Numbers(self.memory * rows)
        return Numbers(self.memory.expand(rows).contiguous())


def numbers_of_groups(values: Tensor, groups: PlaneGroups) -> Numbers:
    """One number for each group, or for each row of its operand if the format has an amax per row."""
    each = groups.format.global_amax == "row"
    return Numbers(values.contiguous(), operand_rows(groups) if each else [1] * len(groups.heights))


def numbers_of_rows(values: Tensor, groups: PlaneGroups) -> Numbers:
    """One number for each row of the operands of all groups."""
    rows = operand_rows(groups)
    if groups.format.global_amax != "row":
        values = values.repeat_interleave(torch.tensor(rows, device="cpu"))
    return Numbers(values.contiguous(), rows)


def operand_rows(groups: PlaneGroups) -> list[int]:
    return list(groups.heights) if groups.direction is ROWWISE else [groups.width] * len(groups.heights)
