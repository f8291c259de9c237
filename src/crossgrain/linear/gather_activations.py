"""Rows of several ranks, gathered as bytes of planes: what arrives is what quantizing all rows would make, bit for bit.

Each rank quantizes its rows under scales of the whole: amaxes are reduced over the ranks first. That gives the
bytes of the whole unless a block has rows of two ranks, or a code depends on where its number lies in the whole
(stochastic rounding). Such tensors are gathered in high precision and quantized by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, same_codes_in_both
from ..planes.transport import Shipment, kind_of, packed, rows_of_chunks, unpack
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..runtime.collectives import gathered_rows, group_rank, group_size
from ..tensor import QuantizedTensorStorage


def why_not_gathered(quantizer: Quantizer, direction: Direction, rows: int) -> str | None:
    """Why the plane of ``rows`` rows of each rank is not a part of the plane of all; None if it is."""
    if isinstance(quantizer, HybridQuantizer):
        derived = direction is COLUMNWISE and quantizer.derives_columns
        source = why_not_gathered(quantizer.child(ROWWISE), ROWWISE, rows) if derived else None
        return source or why_not_gathered(quantizer.child(direction), direction, rows)
    reason = why_places_matter(quantizer, direction)
    if reason is not None:
        return reason
    fmt = quantizer.encoding(direction).format
    tall = fmt.block_rows if direction is ROWWISE else fmt.block_length
    if rows % tall:
        return f"{rows} rows of a rank cut the {tall} rows of a {direction.value} {fmt.name} block"
    return None


def why_places_matter(quantizer: Quantizer, direction: Direction) -> str | None:
    """Why the same rows may be other bytes elsewhere in a tensor, whatever blocks there are; None if they are not."""
    if quantizer.custom:
        return "a custom quantizer makes what it likes"
    if quantizer.encoding(direction).stochastic:
        return "stochastic rounding depends on where a number lies in the whole"
    return None


def gathered_planes(parts: Sequence[Plane], wholes: Sequence[Plane], group: Any) -> None:
    """Fill ``wholes`` from the ``parts`` of all ranks, in one collective."""
    ranks = group_size(group)
    counts = [parts[0].shape[0]] * ranks
    kinds = tuple(kind_of(plane) for plane in parts)
    shipment = Shipment((sum(counts), parts[0].shape[1]), rows_of_chunks(counts), kinds)
    mine = packed(parts, shipment, group_rank(group))
    unpack(gathered_rows(mine, group), shipment, wholes)


def gathered_plane(part: Plane, group: Any) -> Plane:
    """The plane of the rows of all ranks."""
    rows, columns = part.shape
    whole = kind_of(part).empty((rows * group_size(group), columns), part.data.device)
    gathered_planes([part], [whole], group)
    return whole


def gather_quantized_rows(x: Tensor, quantizer: Quantizer, group: Any) -> Any:
    """What ``quantizer`` makes of the rows of all ranks, of which each has as many in ``x`` [M, K].

    Directions are those of its usages. Planes travel if they all may; of a format whose columns are its rows
    transposed, rows alone.
    """
    directions = quantizer._directions_to_make()
    if any(why_not_gathered(quantizer, direction, x.shape[0]) for direction in directions):
        return quantizer.quantize(gathered_rows(x, group))
    sent = [ROWWISE] if len(directions) == 2 and columns_follow_from_rows(quantizer) else directions
    usages = {direction.value: direction in sent for direction in Direction}
    part: QuantizedTensorStorage = quantizer.storing(**usages).reducing(group, axis=0).quantize(x)
    own = quantizer.copy()
    own.leave_group()
    own.set_usage(**usages)
    whole = own.make_empty((x.shape[0] * group_size(group), x.shape[1]), dtype=x.dtype, device=x.device)
    gathered_planes(part.planes(), whole.planes(), group)
    if sent != directions:
        columns = whole._derivable(COLUMNWISE)
        assert columns is not None
        whole._adopt_plane(columns)
        own.set_usage(columnwise=True)
    return whole


def columns_follow_from_rows(quantizer: Quantizer) -> bool:
    """Whether one direction has the codes of the other."""
    if isinstance(quantizer, HybridQuantizer) or quantizer.custom:
        return False
    row, column = (quantizer.encoding(direction) for direction in (ROWWISE, COLUMNWISE))
    return row == column and same_codes_in_both(row.format, column.format)
