"""Quantizing rows of a weight whose blocks other ranks have a part of.

A scale follows from the largest magnitude of its block. Where a shard ends inside a block, the ranks that have a part
of it maximise its amax first; then each encodes its own rows with the scale of all. Codes of rows that a rank does
not have are left zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hybrid import HybridQuantizer
from ..kernels import Target
from ..kernels.partial import needs_neighbours, part_amaxes, write_part
from ..plane import ROWWISE, Direction
from ..quantizer import Quantizer
from ..tensor import QuantizedTensorStorage
from ..tensor.transport import Rows


def quantized_window(
    x: Tensor, quantizer: Quantizer, own: Sequence[Rows], first: int, rank: int, group: Any, layer: str
) -> QuantizedTensorStorage:
    """``x``, the rows from ``first`` on, as ``quantizer`` would quantize the whole weight.

    ``own[rank]`` are the rows that this rank knows; the others of ``x`` are zero.
    """
    made: QuantizedTensorStorage = quantizer._made(x.shape, x.dtype, x.device)
    cuts = sorted({stop for _, stop in own[:-1]})
    start, stop = (at - first for at in own[rank])
    for child, storage in _in_order(quantizer, made):
        targets = child._targets(child._in_own_formats(storage.planes()))
        for target in targets:
            _check_divisible(target, layer)
        amaxes = [part_amaxes(x, target) for target in targets]
        _maximise(amaxes, targets, cuts, first, group)
        for target, (overall, block_max) in zip(targets, amaxes, strict=True):
            target.plane.data.zero_()
            span = (start * x.shape[1], stop * x.shape[1])
            write_part(x, target.with_amax(overall), block_max, [span] if start < stop else [], None, None)
        if isinstance(quantizer, HybridQuantizer) and quantizer._derives_columns():
            x = storage.dequantize(dtype=x.dtype)
    return made


def _in_order(quantizer: Quantizer, made: QuantizedTensorStorage) -> list[tuple[Quantizer, QuantizedTensorStorage]]:
    """What to write, rows before the columns that are made from them. Rows that are not kept are made all the same."""
    if not isinstance(quantizer, HybridQuantizer):
        return [(quantizer, made)]
    children = dict(made._children())  # type: ignore[attr-defined]
    if quantizer._derives_columns() and ROWWISE not in children:
        column = next(iter(children.values()))
        row = quantizer._quantizer_of(ROWWISE).storing(rowwise=True, columnwise=False)
        children = {ROWWISE: row._made(made.shape, made.dtype, made.device), Direction.COLUMNWISE: column}
    return [(quantizer._quantizer_of(direction), child) for direction, child in children.items()]


def _check_divisible(target: Target, layer: str) -> None:
    if needs_neighbours(target.encoding):
        plane = target.plane
        raise NotImplementedError(
            f"{layer}: the shards of the weight end inside its {plane.direction.value} {plane.format.name} blocks, "
            "whose codes depend on all numbers of a block. Choose sizes whose shards hold whole blocks."
        )


def _maximise(
    amaxes: list[tuple[Tensor | None, Tensor | None]],
    targets: Sequence[Target],
    cuts: Sequence[int],
    first: int,
    group: Any,
) -> None:
    """Maximise, over the ranks, global amaxes and those of blocks with a cut inside; in one collective, in place."""
    pieces: list[Tensor] = []
    back: list[tuple[Tensor, int, Tensor]] = []  # where to write what is reduced
    for target, (overall, block_max) in zip(targets, amaxes, strict=True):
        if overall is not None and target.scale is None:
            pieces.append(overall.view(-1))
        if block_max is None:
            continue
        rowwise = target.plane.direction is ROWWISE
        fmt = target.encoding.format
        size = fmt.block_rows if rowwise else fmt.block_length
        by_row = block_max if rowwise else block_max.t()  # one row for each run of ``size`` rows of the matrix
        for block in sorted({cut // size for cut in cuts if cut % size}):
            here = block - first // size
            known = 0 <= here < by_row.shape[0]
            piece = by_row[here].clone() if known else by_row.new_zeros(by_row.shape[1])
            pieces.append(piece)
            if known:
                back.append((by_row, here, piece))
    if not pieces:
        return
    packed = torch.cat(pieces)
    torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX, group=group)
    for piece, reduced in zip(pieces, packed.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(reduced)
    for by_row, here, piece in back:
        by_row[here] = piece
