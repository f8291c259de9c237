"""Decode planes: the definition of what their bytes mean."""

from __future__ import annotations

import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from .blocks import spread
from .elements import element_values
from .hadamard import unrotate
from .packing import unpack
from .scaling import e8m0_value, two_level_decode_factor
from .strips import plane_strip, row_ranges


def decode_operand(plane: Plane) -> Tensor:
    """Decode to the fp32 operand [R, C] of a GEMM. A rotation is not undone."""
    fmt = plane.format
    if fmt.is_identity:
        numbers = plane.data.reshape(plane.shape).to(torch.float32)
        return numbers if plane.direction is ROWWISE else numbers.t()
    strips = list(row_ranges(plane))
    if len(strips) < 2:
        return _decoded(plane)
    out = torch.empty(plane.operand_shape, dtype=torch.float32, device=plane.data.device)
    for start, end in strips:
        out[start:end] = _decoded(plane_strip(plane, start, end))
    return out


def _decoded(plane: Plane) -> Tensor:
    fmt = plane.format
    assert fmt.element is not None
    if plane.data.numel() == 0:  # a group without rows: it needs no table, which would have to be uploaded to a GPU
        return torch.empty(plane.operand_shape, dtype=torch.float32, device=plane.data.device)
    values = element_values(unpack(plane.operand_codes(), fmt.element.bits), fmt.element)
    factor = decode_factors(plane)
    rows = 1 if fmt.layout.replicated else fmt.block_rows
    block = (rows, fmt.block_length) if fmt.block else plane.operand_shape
    return values * spread(factor, block, plane.operand_shape)


def decode(plane: Plane, dtype: torch.dtype) -> Tensor:
    """Decode to the matrix [M, K] in ``dtype``. A rotation is undone."""
    if plane.format.is_identity:
        return plane.data.reshape(plane.shape).to(dtype)
    operand = decode_operand(plane)
    if plane.format.rotation is not None:
        operand = unrotate(operand, plane.format.rotation)
    if plane.direction is not ROWWISE:
        operand = operand.t()
    return operand.to(dtype).contiguous()


def decode_factors(plane: Plane) -> Tensor:
    """The fp32 numbers by which the codes of blocks are multiplied, in the shape of `Plane.operand_scales`."""
    stored, rule = plane.operand_scales(), plane.format.scale_rule
    if rule == "fp32":
        return stored
    if rule in ("e8m0_up", "e8m0_floor"):
        return e8m0_value(stored)
    assert rule == "two_level" and plane.amax is not None
    return two_level_decode_factor(stored, plane.amax.view(-1, 1), plane.format)
