"""Quantize a shard of a weight that ends inside a block, so that several ranks have a part of the block.

A scale is computed from the largest magnitude of its block. Ranks that share a block first take the maximum of their
amaxes. Then each rank encodes its own rows with the common scale (`quantized_window`); the codes of rows that it does
not have are zero. Rotations and 4-over-6 selection need all numbers of a block. For these, ranks exchange the rows of
shared blocks (`fill_split_blocks`), and each rank encodes all blocks it has a part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import Target
from ..kernels.partial import part_amaxes, write_part
from ..linear.padding import padded_matrix
from ..planes import ROWWISE, Direction
from ..planes.transport import Rows
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..runtime.collectives import maximised, without_group
from ..runtime.failures import communicate
from ..tensor import QuantizedTensorStorage


def quantized_window(
    x: Tensor, quantizer: Quantizer, own: Sequence[Rows], first: int, rank: int, group: Any
) -> QuantizedTensorStorage:
    """Quantize ``x``, rows of a weight from ``first`` on, with the bytes that quantizing the whole weight would give.

    ``own[rank]`` are the rows of the weight that this rank has; other rows of ``x`` are zero.
    """
    made: QuantizedTensorStorage = quantizer._made(x.shape, x.dtype, x.device)
    cuts = sorted({stop for _, stop in own[:-1]})
    start, stop = (at - first for at in own[rank])
    for child, storage in _in_order(quantizer, made):
        targets = child._targets(child._in_own_formats(storage.planes()))
        amaxes = [part_amaxes(x, target) for target in targets]
        _maximise(amaxes, targets, cuts, first, group)
        _maximise_overall(amaxes, targets, without_group(child.amax_reduction_group, group))
        for target, (overall, block_max) in zip(targets, amaxes, strict=True):
            target.plane.data.zero_()
            span = (start * x.shape[1], stop * x.shape[1])
            write_part(x, target.with_amax(overall), block_max, [span] if start < stop else [], None, None)
        if quantizer.derives_columns:
            x = storage.dequantize(dtype=x.dtype)
    return made


def fill_split_blocks(x: Tensor, cuts: Sequence[int], block: int, first: int, group: Any) -> None:
    """Fill in the rows of ``x`` that other ranks have, for blocks that are split between ranks.

    ``x`` has whole blocks of rows, from row ``first`` of the weight on. Rows that a rank does not have are zero, so
    that adding the bytes of all ranks gives the rows.
    """
    starts = sorted({cut // block * block - first for cut in cuts if cut % block})
    blocks = [x[max(start, 0) : max(start + block, 0)] if start < x.shape[0] else x[:0] for start in starts]
    packed = torch.stack([padded_matrix(rows, block, x.shape[1]) for rows in blocks]).view(torch.uint8)
    communicate(torch.distributed.all_reduce, packed, group=group)
    for rows, piece in zip(blocks, packed.view(x.dtype), strict=True):
        rows.copy_(piece[: rows.shape[0]])


def _in_order(quantizer: Quantizer, made: QuantizedTensorStorage) -> list[tuple[Quantizer, QuantizedTensorStorage]]:
    """The storages to write, rows before the columns that are made from them, even if the rows are not kept."""
    if not isinstance(quantizer, HybridQuantizer):
        return [(quantizer, made)]
    children = dict(made._children())  # type: ignore[attr-defined]
    if quantizer.derives_columns and ROWWISE not in children:
        column = next(iter(children.values()))
        row = quantizer._quantizer_of(ROWWISE).storing(rowwise=True, columnwise=False)
        children = {ROWWISE: row._made(made.shape, made.dtype, made.device), Direction.COLUMNWISE: column}
    return [(quantizer._quantizer_of(direction), child) for direction, child in children.items()]


def _maximise(
    amaxes: list[tuple[Tensor | None, Tensor | None]],
    targets: Sequence[Target],
    cuts: Sequence[int],
    first: int,
    group: Any,
) -> None:
    """Take the maximum over ranks of global amaxes and of amaxes of split blocks, in place, in one collective."""
    pieces: list[Tensor] = []
    back: list[tuple[Tensor, int, Tensor]] = []  # where to write what is reduced
    for target, (overall, block_max) in zip(targets, amaxes, strict=True):
        if overall is not None and target.scale is None:
            pieces.append(overall)
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
    _maximise_together(pieces, group)
    for by_row, here, piece in back:
        by_row[here] = piece


def _maximise_overall(
    amaxes: Sequence[tuple[Tensor | None, Tensor | None]], targets: Sequence[Target], groups: Any
) -> None:
    """Take the maximum of global amaxes over the ranks that have other parts of the weight too, in place."""
    found = [amax for target, (amax, _) in zip(targets, amaxes, strict=True) if target.scale is None]
    if groups is not None:
        _maximise_together([amax for amax in found if amax is not None], groups)


def _maximise_together(pieces: Sequence[Tensor], group: Any) -> None:
    for piece, reduced in zip(pieces, maximised(pieces, group), strict=True):
        piece.copy_(reduced)
