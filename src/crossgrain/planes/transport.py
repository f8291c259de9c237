"""Send shards of a tensor to other ranks: all planes of a shard in one buffer of bytes.

A shard is a range of the first dimension. Codes and block scales are sent by rows (M-major), so that the rows of a
shard follow the rows of the shard before. A scale or an amax of the whole tensor is sent by every rank, and must be the
same. Every rank sends as many bytes as the largest shard needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..runtime.host_and_device import require
from .plane import Direction, Plane, empty_plane, round_up
from .rows import m_major_buffers
from .slicing import slice_plane

Rows = tuple[int, int]  # start and stop in the first dimension

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # integer dtypes by size in bytes
_ALIGNMENT = 8  # the bytes of a rank are a multiple of this, so that they can be viewed as any dtype


class PlaneKind(NamedTuple):
    """Everything about a plane except its size and its buffers."""

    format: Format
    direction: Direction
    transposed: bool
    dtype: torch.dtype

    def empty(self, shape: Sequence[int], device: torch.device) -> Plane:
        """Allocate a plane of this kind for a tensor of ``shape``."""
        return empty_plane(
            self.format, self.direction, shape, device=device, transposed=self.transposed, dtype=self.dtype
        )


class Shipment(NamedTuple):
    """What ranks send to each other.

    Attributes:
        shape: shape of the whole tensor.
        rows: the rows that each rank sends.
        kinds: the kinds of the planes.
        known: the rows whose numbers each rank has, if it sends more rows in order to send whole blocks. The codes of
            the other rows are zero. The scales of blocks of which it has a part are right.
    """

    shape: tuple[int, ...]
    rows: tuple[Rows, ...]
    kinds: tuple[PlaneKind, ...]
    known: tuple[Rows, ...] | None = None

    def bytes_per_rank(self) -> int:
        """The number of bytes that every rank sends."""
        return max(_part_places(self.kinds, (stop - start, *self.shape[1:]))[1] for start, stop in self.rows)


def kind_of(plane: Plane) -> PlaneKind:
    """The kind of a plane."""
    return PlaneKind(plane.format, plane.direction, plane.transposed, plane.data.dtype)


def rows_of_chunks(counts: Sequence[int]) -> tuple[Rows, ...]:
    """The rows of shards that follow each other, from the number of rows of each."""
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def packed(planes: Sequence[Plane], shipment: Shipment, rank: int) -> Tensor:
    """The bytes that this rank sends: [1, bytes]."""
    start, stop = shipment.rows[rank]
    places, _ = _part_places(shipment.kinds, (stop - start, *shipment.shape[1:]))
    buffer = torch.zeros(1, shipment.bytes_per_rank(), dtype=torch.uint8, device=planes[0].data.device)
    parts = [part for plane in planes for part in _parts(plane)]
    for place, part in zip(places, parts, strict=True):
        _at(buffer[0], place).copy_(part)
    return buffer


def unpack(gathered: Tensor, shipment: Shipment, planes: Sequence[Plane]) -> None:
    """Fill the planes of the whole tensor from the bytes of all ranks.

    Args:
        gathered: the bytes [ranks, bytes].
        shipment: what the ranks have sent.
        planes: the planes to fill.

    Raises:
        RuntimeError: the planes are of other kinds, or the ranks have sent different scales of the whole tensor.
    """
    kinds = tuple(kind_of(plane) for plane in planes)
    if kinds != shipment.kinds:
        raise RuntimeError(
            f"the gathered shards have the planes {_names(shipment.kinds)}, but this tensor has {_names(kinds)}"
        )
    for plane in planes:
        if plane.scale is not None:
            plane.scale.zero_()  # for the padding: the memory may be uninitialised
        if shipment.known is not None:
            plane.data.zero_()
    for rank, (start, stop) in enumerate(shipment.rows):
        places = iter(_part_places(shipment.kinds, (stop - start, *shipment.shape[1:]))[0])
        for plane in planes:
            mine = _parts(slice_plane(plane, shipment.shape, 0, start, stop))
            theirs = [_at(gathered[rank], next(places)) for _ in mine]
            _check_shared(plane, theirs, rank, shipment)
            if shipment.known is not None and start < stop:
                mine, theirs = _merged_codes(mine, theirs, (start, stop), shipment.known[rank])
            for own, piece in zip(mine, theirs, strict=True):
                own.copy_(piece)


def _merged_codes(
    mine: list[Tensor], theirs: list[Tensor], rows: Rows, known: Rows
) -> tuple[list[Tensor], list[Tensor]]:
    """Merge codes of blocks that a rank has only in part. Returns what is left to copy: the scales of known rows."""
    bits = _BITS[mine[0].element_size()]
    mine[0].view(bits).bitwise_or_(theirs[0].view(bits))
    left: tuple[list[Tensor], list[Tensor]] = ([], [])
    for own, piece in zip(mine[1:], theirs[1:], strict=True):
        if own.dim() == 2:  # scales of blocks, by rows of the matrix; other parts are the same for all ranks
            per_scale = -(-(rows[1] - rows[0]) // own.shape[0])
            first, last = (known[0] - rows[0]) // per_scale, -(-(known[1] - rows[0]) // per_scale)
            own, piece = own[first:last], piece[first:last]
        left[0].append(own)
        left[1].append(piece)
    return left


def _check_shared(plane: Plane, parts: Sequence[Tensor], rank: int, shipment: Shipment) -> None:
    """Raise if a rank has sent another scale of the whole tensor than rank 0."""
    shared = plane.scale_across((0,))
    if shared is None or rank == 0:
        return
    theirs = parts[-1].view(-1)
    known = (
        f"the shards of this tensor of shape {list(shipment.shape)} have different {plane.direction.value} "
        f"{plane.format.name} scales for the whole tensor"
    )
    cause = "A shard was written without reducing amaxes over the ranks."

    def details() -> str:
        first, other = shared.view(-1)[:1].tolist(), theirs[:1].tolist()
        return f"{known}: rank 0 has {first}, rank {rank} has {other}. {cause}"

    require((shared.view(-1) == theirs).all(), f"{known}, on rank 0 and rank {rank}. {cause}", details, RuntimeError)


class _Place(NamedTuple):
    """The place of a part in the bytes of a rank."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


def _at(row: Tensor, place: _Place) -> Tensor:
    size = place.shape.numel() * place.dtype.itemsize
    return row[place.start : place.start + size].view(place.dtype).view(place.shape)


def _parts(plane: Plane) -> list[Tensor]:
    """The parts of a plane: codes first, what all shards share last."""
    shared = plane.scale_across((0,))
    return [*(buffer for _, buffer in m_major_buffers(plane)), *([] if shared is None else [shared])]


@lru_cache(maxsize=1024)
def _part_places(kinds: tuple[PlaneKind, ...], shape: tuple[int, ...]) -> tuple[tuple[_Place, ...], int]:
    """The places of the parts of a shard's planes, and their number of bytes together."""
    places, end = [], 0
    for kind in kinds:
        for part in _parts(kind.empty(shape, torch.device("meta"))):
            start = round_up(end, part.dtype.itemsize)
            places.append(_Place(start, part.dtype, part.shape))
            end = start + part.numel() * part.dtype.itemsize
    return tuple(places), round_up(end, _ALIGNMENT)


def _names(kinds: Sequence[PlaneKind]) -> str:
    return ", ".join(f"{kind.direction.value} {kind.format.name}" for kind in kinds) or "nothing"
