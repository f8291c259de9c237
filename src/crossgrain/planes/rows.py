"""The buffers of a plane by rows of the matrix (M-major), and rows of a plane as bytes.

Rows of a rowwise plane can be converted to rows of bytes, which can be sent, reordered and concatenated. This needs a
format in which every row has its own scales. A scale or an amax of the whole tensor is not part of these bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from .plane import ROWWISE, Plane, empty_plane


def m_major_buffers(plane: Plane) -> list[tuple[str, Tensor]]:
    """The parts of a plane ("data", "scale", "amax") that each row has itself, M-major, as views."""
    parts = [("data", plane.operand_codes())]
    if plane.scale is not None and plane.format.block is not None:
        parts.append(("scale", plane.operand_scales()))
    if plane.direction is not ROWWISE:
        parts = [(name, buffer.t()) for name, buffer in parts]
    elif plane.amax is not None and plane.format.global_amax == "row":
        parts.append(("amax", plane.amax))
    return parts


def rows_stand_alone(fmt: Format) -> bool:
    """Whether no block contains numbers of two rows."""
    return fmt.block_rows == 1


def bytes_of_rows(plane: Plane) -> Tensor:
    """The bytes of each row, [M, bytes]: its codes, scales and amax. A row of zero bytes decodes to zeros."""
    plane.check_readable()
    return torch.cat([_copied(_matrix(part)).view(torch.uint8) for _, part in m_major_buffers(plane)], dim=1)


def plane_of_rows(rows: Tensor, like: Plane) -> Plane:
    """Make a plane from the bytes of rows. It has the format, the width and the per-tensor scale of ``like``."""
    shape = (rows.shape[0], like.shape[1])
    plane = empty_plane(like.format, ROWWISE, shape, device=rows.device, dtype=like.data.dtype)
    parts = [_matrix(part) for _, part in m_major_buffers(plane)]
    widths = [part.shape[1] * part.element_size() for part in parts]
    for part, own in zip(parts, rows.split(widths, dim=1), strict=True):
        part.copy_(_copied(own).view(part.dtype))
    common, theirs = plane.scale_across((0,)), like.scale_across((0,))
    if common is not None and theirs is not None:
        common.copy_(theirs)
    return plane


def _copied(matrix: Tensor) -> Tensor:
    """A copy whose bytes can be viewed as other numbers.

    A single row or column counts as contiguous, but may begin at any byte, or have any stride.
    """
    return torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device).copy_(matrix)


def _matrix(part: Tensor) -> Tensor:
    return part if part.dim() == 2 else part.unsqueeze(1)
