"""Shards of a tensor on their way to the other ranks: all planes in one buffer of bytes.

A shard is a run of rows (of the first dimension). What differs between shards, codes and block scales, is sent
M-major, so that the rows of one shard follow those of the one before; what they share, a scale or an amax of the
whole tensor, is sent by all, and has to be the same. Every rank sends as many bytes as the largest shard needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from .plane import Direction, Plane, empty_plane, round_up
from .rows import m_major_buffers
from .slicing import slice_plane

Rows = tuple[int, int]  # first and last, exclusive, of the first dimension

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ALIGNMENT = 8  # of a rank's bytes, so that any dtype can be viewed in them


class PlaneKind(NamedTuple):
    """All of a plane but its size and its buffers."""

    format: Format
    direction: Direction
    transposed: bool
    dtype: torch.dtype

    def empty(self, shape: Sequence[int], device: torch.device) -> Plane:
        return empty_plane(
            self.format, self.direction, shape, device=device, transposed=self.transposed, dtype=self.dtype
        )


class Shipment(NamedTuple):
    """What travels: planes of these kinds, of a tensor of this shape, of which each rank sends some rows.

    ``known``  the rows whose numbers each rank knows, where it sends more to send whole blocks. The codes of others are
               zero; scales of blocks that it knows a part of are right.
    """

    shape: tuple[int, ...]
    rows: tuple[Rows, ...]
    kinds: tuple[PlaneKind, ...]
    known: tuple[Rows, ...] | None = None

    def bytes_per_rank(self) -> int:
        return max(_part_places(self.kinds, (stop - start, *self.shape[1:]))[1] for start, stop in self.rows)


def kind_of(plane: Plane) -> PlaneKind:
    return PlaneKind(plane.format, plane.direction, plane.transposed, plane.data.dtype)


def rows_of_chunks(counts: Sequence[int]) -> tuple[Rows, ...]:
    """Where the shards are, one after another."""
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def packed(planes: Sequence[Plane], shipment: Shipment, rank: int) -> Tensor:
    """This rank's bytes: [1, bytes]."""
    start, stop = shipment.rows[rank]
    places, _ = _part_places(shipment.kinds, (stop - start, *shipment.shape[1:]))
    buffer = torch.zeros(1, shipment.bytes_per_rank(), dtype=torch.uint8, device=planes[0].data.device)
    parts = [part for plane in planes for part in _parts(plane)]
    for place, part in zip(places, parts, strict=True):
        _at(buffer[0], place).copy_(part)
    return buffer


def unpack(gathered: Tensor, shipment: Shipment, planes: Sequence[Plane]) -> None:
    """Fill ``planes``, of the whole tensor, from the bytes of all ranks: [ranks, bytes]."""
    kinds = tuple(kind_of(plane) for plane in planes)
    if kinds != shipment.kinds:
        raise RuntimeError(f"the gathered shards are {_names(shipment.kinds)}, this tensor takes {_names(kinds)}")
    for plane in planes:
        if plane.scale is not None:
            plane.scale.zero_()  # its padding: the memory may be new
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
    """What is left to copy after codes of partly known blocks were merged: the scales of known rows."""
    bits = _BITS[mine[0].element_size()]
    mine[0].view(bits).bitwise_or_(theirs[0].view(bits))
    left: tuple[list[Tensor], list[Tensor]] = ([], [])
    for own, piece in zip(mine[1:], theirs[1:], strict=True):
        if own.dim() == 2:  # scales: a row of them for some rows of the matrix; others are shared by all
            per_scale = -(-(rows[1] - rows[0]) // own.shape[0])
            first, last = (known[0] - rows[0]) // per_scale, -(-(known[1] - rows[0]) // per_scale)
            own, piece = own[first:last], piece[first:last]
        left[0].append(own)
        left[1].append(piece)
    return left


def _check_shared(plane: Plane, parts: Sequence[Tensor], rank: int, shipment: Shipment) -> None:
    """What belongs to the whole tensor came first from rank 0: all others have to say the same."""
    shared = plane.scale_across((0,))
    if shared is None or rank == 0:
        return
    if not torch.equal(shared.view(-1), parts[-1].view(-1)):
        raise RuntimeError(
            f"the shards of this tensor of shape {list(shipment.shape)} have different {plane.direction.value} "
            f"{plane.format.name} scales for the whole: rank 0 has {shared.view(-1)[:1].tolist()}, rank {rank} "
            f"{parts[-1].view(-1)[:1].tolist()}. A shard was written without reducing amaxes over the ranks."
        )


class _Place(NamedTuple):
    """Of a part in the bytes of a rank."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


def _at(row: Tensor, place: _Place) -> Tensor:
    size = place.shape.numel() * place.dtype.itemsize
    return row[place.start : place.start + size].view(place.dtype).view(place.shape)


def _parts(plane: Plane) -> list[Tensor]:
    """Codes first; what all shards have in common last."""
    shared = plane.scale_across((0,))
    return [*(buffer for _, buffer in m_major_buffers(plane)), *([] if shared is None else [shared])]


@lru_cache(maxsize=1024)
def _part_places(kinds: tuple[PlaneKind, ...], shape: tuple[int, ...]) -> tuple[tuple[_Place, ...], int]:
    """Where the parts of a shard's planes are, and how many bytes they take together."""
    places, end = [], 0
    for kind in kinds:
        for part in _parts(kind.empty(shape, torch.device("meta"))):
            start = round_up(end, part.dtype.itemsize)
            places.append(_Place(start, part.dtype, part.shape))
            end = start + part.numel() * part.dtype.itemsize
    return tuple(places), round_up(end, _ALIGNMENT)


def _names(kinds: Sequence[PlaneKind]) -> str:
    return ", ".join(f"{kind.direction.value} {kind.format.name}" for kind in kinds) or "nothing"
