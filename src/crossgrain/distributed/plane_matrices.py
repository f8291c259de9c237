"""View planes as plain matrices that are sharded like their tensor, so that torch can save and reshard them.

Every buffer of a plane is viewed as a matrix without padding, whose rows run along M and whose columns run along K.
Codes and block scales are cut where the tensor is cut. A scale of the whole tensor is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planes import ROWWISE, Direction, Plane
from ..planes.rows import m_major_buffers
from ..planes.transport import kind_of
from ..quantizers.hybrid_tensor import HybridQuantizedTensorStorage
from ..tensor import QuantizedTensorStorage
from ..tensor.sharding import cut_along, is_sharded, local_part


class _Matrix(NamedTuple):
    buffer: Tensor  # a view of the plane
    cut_along: tuple[int, ...]  # the axes of the matrix along which it is cut with the tensor


def named_planes(tensor: QuantizedTensorStorage) -> dict[Direction, Plane]:
    """The planes that must be saved, by direction; all other planes follow from them."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        return {direction: plane for direction in Direction for plane in tensor._planes_that_travel([direction])}
    return {plane.direction: plane for plane in tensor._planes_that_travel(tuple(Direction))}


def plane_matrices(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """``rowwise.data`` and so on of a quantized tensor or of a DTensor of such. They are views, sharded like it."""
    local: QuantizedTensorStorage = local_part(tensor)
    local._check_fresh()
    for direction, plane in named_planes(local).items():
        whole = _matrices(kind_of(plane).empty(tensor.shape, torch.device("meta"))) if is_sharded(tensor) else {}
        for part, matrix in _matrices(plane).items():
            name = f"{direction.value}.{part}"
            yield name, _sharded(name, matrix, whole[part].buffer, tensor) if whole else matrix.buffer


def _matrices(plane: Plane) -> dict[str, _Matrix]:
    found = {
        part: _Matrix(buffer.view(-1, 1), (0,)) if buffer.dim() == 1 else _Matrix(buffer, (0, 1))
        for part, buffer in m_major_buffers(plane)
    }
    shared = plane.scale_across((0,))
    if shared is not None:
        of_columns = plane.format.global_amax == "row" and plane.direction is not ROWWISE
        part = "scale" if plane.format.block is None else "amax"
        found[part] = _Matrix(shared.view(1, -1), (1,) if of_columns else ())
    return found


def _sharded(name: str, matrix: _Matrix, whole: Tensor, tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = []
    for placement in tensor.placements:
        axis, dim = None, cut_along(placement)
        if dim is not None:
            axis = {0: 0, tensor.dim() - 1: 1}.get(dim)
            if axis is None:
                raise NotImplementedError(
                    f"a quantized tensor of shape {list(tensor.shape)} that is sharded along dimension {dim} cannot be "
                    "saved: only shards along the first or the last dimension can be"
                )
        placements.append(_along(placement, axis) if axis in matrix.cut_along else Replicate())
    expected, _ = compute_local_shape_and_global_offset(whole.shape, tensor.device_mesh, placements)
    if tuple(expected) != tuple(matrix.buffer.shape):
        raise ValueError(
            f"the shards of a quantized tensor of shape {list(tensor.shape)} are not those that torch would cut, so it "
            f"cannot be saved: of {name} {list(whole.shape)} this rank has {list(matrix.buffer.shape)}, and torch "
            f"expects {list(expected)}"
        )
    return DTensor.from_local(
        matrix.buffer, tensor.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _along(placement: Any, axis: int | None) -> Any:
    """The same placement, but of dimension ``axis``."""
    from torch.distributed.tensor import Shard

    if placement.dim == axis:
        return placement
    if type(placement) is not Shard:
        raise NotImplementedError(
            f"a quantized tensor with the placement {placement} cannot be saved; use Shard or Replicate"
        )
    assert axis is not None
    return Shard(axis)
