"""The other direction's plane where its bytes follow from this one's: whole-tensor scales, square tiles."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..planes import Plane, empty_plane
from .reference.packing import pack, unpack


def transposed_plane(plane: Plane, shape: Sequence[int], transposed: bool) -> Plane:
    """The plane of the other direction, in buffers of its own.

    ``shape`` is the tensor's; ``transposed`` says how the other direction stores its codes.
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
