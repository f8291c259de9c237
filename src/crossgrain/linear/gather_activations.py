"""Gather rows from several ranks as bytes of planes. The result has the bytes that quantizing all rows would give.

Each rank quantizes its rows with the scales of the whole tensor, for which amaxes are reduced over ranks first. That
gives the bytes of the whole, also with stochastic rounding, unless a block contains rows of two ranks. Such tensors are
gathered in high precision, and every rank quantizes all of them.
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
    """Why planes cannot be gathered, if each rank has ``rows`` rows; None if they can."""
    if isinstance(quantizer, HybridQuantizer):
        derived = direction is COLUMNWISE and quantizer.derives_columns
        source = why_not_gathered(quantizer.child(ROWWISE), ROWWISE, rows) if derived else None
        return source or why_not_gathered(quantizer.child(direction), direction, rows)
    if quantizer.custom:
        return "the bytes that a custom quantizer makes may depend on the position of a row"
    fmt = quantizer.encoding(direction).format
    tall = fmt.block_rows if direction is ROWWISE else fmt.block_length
    if rows % tall:
        return f"{rows} rows per rank are not a multiple of the {tall} rows of a {direction.value} {fmt.name} block"
    return None


def gathered_planes(parts: Sequence[Plane], wholes: Sequence[Plane], group: Any) -> None:
    """Fill the planes ``wholes`` from the ``parts`` of all ranks, in one collective."""
    ranks = group_size(group)
    counts = [parts[0].shape[0]] * ranks
    kinds = tuple(kind_of(plane) for plane in parts)
    shipment = Shipment((sum(counts), parts[0].shape[1]), rows_of_chunks(counts), kinds)
    mine = packed(parts, shipment, group_rank(group))
    unpack(gathered_rows(mine, group), shipment, wholes)


def gathered_plane(part: Plane, group: Any) -> Plane:
    """Gather a plane: the rows of all ranks."""
    rows, columns = part.shape
    whole = kind_of(part).empty((rows * group_size(group), columns), part.data.device)
    gathered_planes([part], [whole], group)
    return whole


def gather_quantized_rows(x: Tensor, quantizer: Quantizer, group: Any) -> Any:
    """Quantize the rows of all ranks, in the directions of the quantizer's usages.

    Planes are sent if that is possible for all directions. If columnwise codes are the transposed rowwise codes, only
    rowwise planes are sent.

    Args:
        x: the rows of this rank [M, K]; all ranks have the same number.
        quantizer: the quantizer.
        group: the process group.

    Returns:
        The quantized tensor of all rows.
    """
    directions = quantizer._directions_to_make()
    if any(why_not_gathered(quantizer, direction, x.shape[0]) for direction in directions):
        return quantizer.same_on(group).quantize(gathered_rows(x, group))
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
    """Whether the codes of one direction can be made from those of the other: not if each is rounded at random."""
    if isinstance(quantizer, HybridQuantizer) or quantizer.custom:
        return False
    row, column = (quantizer.encoding(direction) for direction in (ROWWISE, COLUMNWISE))
    return row == column and not row.stochastic and same_codes_in_both(row.format, column.format)
