"""Make the plane of one direction from that of the other, for formats with per-tensor scales or square tiles."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..planes import Plane, empty_plane
from .reference.packing import pack, unpack


def transposed_plane(plane: Plane, shape: Sequence[int], transposed: bool) -> Plane:
    """Make the plane of the other direction, in new buffers.

    Args:
        plane: the plane.
        shape: shape of the tensor.
        transposed: whether the other direction stores its codes transposed.
    """
    plane.check_readable()
    fmt = plane.format
    assert fmt.is_symmetric and fmt.element is not None and plane.scale is not None
    other = empty_plane(fmt, plane.direction.other, shape, device=plane.data.device, transposed=transposed)
    codes = unpack(plane.operand_codes(), fmt.element.bits)
    other.operand_codes().copy_(pack(codes.t().contiguous(), fmt.element.bits))
    other.operand_scales().copy_(_transposed_scales(plane))
    if plane.amax is not None and other.amax is not None:
        other.amax.copy_(plane.amax)
    return other


def _transposed_scales(plane: Plane) -> Tensor:
    scales, rows = plane.operand_scales(), plane.format.block_rows
    if not plane.format.layout.replicated:
        return scales.t()
    return scales[::rows].t().repeat_interleave(rows, dim=0)
