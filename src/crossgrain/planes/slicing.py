"""Slice a plane: views of its codes and scales. A slice must begin and end between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from .plane import ROWWISE, Plane, scale_grid


class CutsBlocks(ValueError):
    """A piece of a tensor is not made of whole blocks, so no planes can represent it."""


def slice_plane(plane: Plane, shape: Sequence[int], dim: int, start: int, stop: int, ragged_end: bool = False) -> Plane:
    """Slice a plane. The slice has the same memory.

    Args:
        plane: the plane.
        shape: shape of the tensor.
        dim: dimension of the tensor to slice: the first or the last.
        start: begin of the slice.
        stop: end of the slice.
        ragged_end: allow a slice that ends inside a block, if the format has partial blocks: the rest is not used.

    Raises:
        CutsBlocks: the slice begins or ends inside a block.
    """
    if (start, stop) == (0, shape[dim]):
        return plane
    along_k = dim == len(shape) - 1
    rows, cols = plane.shape
    unit = 1 if along_k else rows // shape[0]  # matrix rows (or columns) per step of the dimension
    new_shape = (rows, stop - start) if along_k else ((stop - start) * unit, cols)
    if not (ragged_end and plane.format.ragged):
        _check_boundary(plane, shape, dim, (start, stop), unit)

    operand_axis = int(along_k == (plane.direction is ROWWISE))  # 1: along the blocks
    first, count = start * unit, (stop - start) * unit
    return replace(
        plane,
        shape=new_shape,
        data=_sliced_codes(plane, shape, dim, start, stop),
        scale=_sliced_scales(plane, operand_axis, first, count),
        amax=_sliced_amax(plane, operand_axis, first, count),
    )


def _check_boundary(plane: Plane, shape: Sequence[int], dim: int, cut: tuple[int, int], unit: int) -> None:
    fmt = plane.format
    if fmt.block is None:
        return
    along_k = dim == len(shape) - 1
    multiple = fmt.block[1] if along_k == (plane.direction is ROWWISE) else fmt.block[0]
    size = plane.shape[1] if along_k else plane.shape[0]
    for position in (at * unit for at in cut):
        if position % multiple and position != size:
            axis = "K" if along_k else "M"
            raise CutsBlocks(
                f"cannot slice a tensor of shape {list(shape)} at [{cut[0]}:{cut[1]}] in dimension {dim}: its "
                f"{plane.direction.value} {fmt.name} plane can only be cut at multiples of {multiple} along {axis}, "
                f"and {position} is not one"
            )


def _sliced_codes(plane: Plane, shape: Sequence[int], dim: int, start: int, stop: int) -> Tensor:
    bits = 8 if plane.format.element is None else plane.format.element.bits
    along_k = dim == len(shape) - 1
    if plane.direction is ROWWISE or not plane.transposed:
        data_dim, step = dim, bits if along_k else 8
    elif along_k:
        data_dim, step = 0, 8
    elif bits < 8:  # a transposed plane with codes of less than a byte has the shape [K, bytes of M]
        data_dim, step = 1, bits * (plane.shape[0] // shape[0])
    else:
        data_dim, step = 1, 8
    return plane.data.narrow(data_dim, start * step // 8, (stop - start) * step // 8)


def _sliced_scales(plane: Plane, operand_axis: int, first: int, count: int) -> Tensor | None:
    fmt = plane.format
    if plane.scale is None or fmt.block is None:
        return plane.scale
    per_scale = fmt.block[operand_axis] if operand_axis or not fmt.layout.replicated else 1
    operand = list(plane.operand_shape)
    operand[operand_axis] = count
    scales = scale_grid(fmt, (operand[0], operand[1]))[operand_axis]
    stored_axis = operand_axis if plane._scales_operand_major else 1 - operand_axis
    return plane.scale.narrow(stored_axis, first // per_scale, scales)


def _sliced_amax(plane: Plane, operand_axis: int, first: int, count: int) -> Tensor | None:
    if plane.amax is None or plane.format.global_amax != "row" or operand_axis == 1:
        return plane.amax
    return plane.amax.narrow(0, first, count)
