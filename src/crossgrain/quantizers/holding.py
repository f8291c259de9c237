"""`holding`: planes that were made without a tensor around them, as the storage that a quantizer would make."""

from __future__ import annotations

from typing import Any

import torch

from ..planes import Direction, Plane, PlaneSource
from ..tensor import QuantizedTensorStorage
from .base import Quantizer
from .hybrid import HybridQuantizedTensorStorage, HybridQuantizer
from .identity import IdentityQuantizer, IdentityTensorStorage


def holding(quantizer: Quantizer, planes: PlaneSource, dtype: torch.dtype) -> QuantizedTensorStorage:
    """Make a storage that has existing planes, which are neither copied nor changed.

    Args:
        quantizer: the quantizer that made the planes. Custom quantizers are not possible.
        planes: one or two planes.
        dtype: nominal dtype: what ``dequantize`` returns.
    """
    present = {direction: plane for direction in Direction if (plane := planes.plane(direction)) is not None}
    if isinstance(quantizer, HybridQuantizer):
        children = {
            direction: _held(quantizer.child(direction), [plane], dtype) for direction, plane in present.items()
        }
        row, column = (children.get(direction) for direction in Direction)
        shape = next(iter(present.values())).shape
        usages = {direction.value: direction in present for direction in Direction}
        own = quantizer.storing(**usages)
        own.leave_group()
        return HybridQuantizedTensorStorage(
            rowwise_storage=row, columnwise_storage=column, quantizer=own, fake_dtype=dtype, shape=shape
        )
    made: QuantizedTensorStorage = _held(quantizer, list(present.values()), dtype)
    return made


def _held(quantizer: Quantizer, planes: list[Plane], dtype: torch.dtype) -> Any:
    if isinstance(quantizer, IdentityQuantizer):
        return IdentityTensorStorage(planes[0].data, dtype, quantizer)
    usages = {direction.value: any(plane.direction is direction for plane in planes) for direction in Direction}
    own = quantizer.storing(**usages)
    own.leave_group()
    made = own._blank(planes[0].shape, dtype, planes[0].data.device)
    for plane in planes:
        made._set_plane(plane.direction, plane)
    return made
