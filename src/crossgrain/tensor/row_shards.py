"""Buffers of shards that can be concatenated along the first dimension.

The codes and block scales of each plane are laid out by rows (M-major), without padding, so that the rows of a shard
follow the rows of the shard before. What the whole tensor shares (per-tensor scales, the global amax) is not sent: it
must be the same in all shards, as in slices of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..planes import empty_plane
from ..planes.rows import m_major_buffers

if TYPE_CHECKING:
    from .holder import PlaneHolder


def shard_field_names(holder: PlaneHolder) -> tuple[str, ...]:
    """Names of the attributes with the buffers to gather, in their order."""
    return tuple(
        getattr(holder._plane_buffers[plane.direction], part)
        for plane in holder.planes()
        for part, _ in m_major_buffers(plane)
    )


def extract_shard(holder: PlaneHolder) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The buffers of a shard, contiguous and M-major, and what `assign_gathered` needs to know."""
    holder._check_fresh()
    planes = holder.planes()
    buffers = [buffer.contiguous() for plane in planes for _, buffer in m_major_buffers(plane)]
    meta = {
        "field_names": shard_field_names(holder),
        "layouts": [(plane.format, plane.direction, plane.transposed) for plane in planes],
        "scalars": [plane.scale_across((0,)) for plane in planes],
    }
    return tuple(buffers), meta


def assign_gathered(holder: PlaneHolder, gathered: Sequence[Tensor], meta: dict[str, Any]) -> None:
    """Fill an object with the shape of the whole tensor from the gathered buffers of all shards.

    Raises:
        RuntimeError: the number or the shapes of the buffers are wrong.
    """
    names = meta["field_names"]
    if len(gathered) != len(names):
        raise RuntimeError(
            f"{type(holder).__name__}: got {len(gathered)} gathered buffers for the {len(names)} fields {list(names)}"
        )
    rest = list(gathered)
    planes = []
    for (fmt, direction, transposed), scalar in zip(meta["layouts"], meta["scalars"], strict=True):
        like = rest[0]
        plane = empty_plane(fmt, direction, holder._shape, device=like.device, transposed=transposed, dtype=like.dtype)
        for part, mine in m_major_buffers(plane):
            theirs = rest.pop(0)
            if theirs.shape != mine.shape:
                raise RuntimeError(
                    f"{type(holder).__name__} of shape {list(holder._shape)}: the gathered {direction.value} {part} "
                    f"has shape {list(theirs.shape)}, but it should be {list(mine.shape)}"
                )
            mine.copy_(theirs)
        own = plane.scale_across((0,))
        if own is not None:
            own.copy_(scalar)
        planes.append(plane)
    for name in holder._buffer_names:
        setattr(holder, name, None)
    for plane in planes:
        holder._adopt_plane(plane)
