"""Operands of which each rank has some rows. They are gathered for a GEMM, as planes if that gives the same bytes.

For wgrad only the rows of x of this rank are saved; they are gathered again in backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, PlaneSource
from ..quantizers.base import Quantizer
from ..runtime.collectives import gathered_rows, group_size
from .call import LinearCall
from .gather_activations import gather_quantized_rows, gathered_plane, why_not_gathered
from .padding import Sizes, padded_matrix
from .saved_planes import KeptInput, Operand


def gathered_input(
    x: Tensor, call: LinearCall, sizes: Sizes, padded: Sizes, *, wgrad: bool
) -> tuple[Operand, KeptInput | None]:
    """x of all ranks for fprop, and what is saved of it for wgrad.

    Args:
        x: the rows of this rank, in high precision.
        call: quantizers and options.
        sizes: the sizes of all rows.
        padded: the same with padding.
        wgrad: whether wgrad will run.
    """
    assert call.parallel is not None
    group, quantizer = call.parallel.group, call.input
    matrix = x.flatten(0, -2).to(call.dtype)
    if quantizer is None:
        return gathered_rows(matrix, group), KeptInput(x, is_part=True) if wgrad else None
    matrix = padded_matrix(matrix, matrix.shape[0], padded.k)
    columns = wgrad and call.quantizes_backward and not call.keep_input
    wanted = [ROWWISE, COLUMNWISE] if columns else [ROWWISE]
    possible = [ROWWISE, COLUMNWISE] if padded.m == sizes.m else [ROWWISE]  # only wgrad needs M to be padded
    sent = [d for d in wanted if d in possible and why_not_gathered(quantizer, d, matrix.shape[0]) is None]
    if columns and sent != wanted and not _same_bytes_again(quantizer):
        whole = _gathered_and_quantized(matrix, quantizer, group, padded.m, rowwise=True, columnwise=True)
        return _plane(whole, ROWWISE), KeptInput(_plane(whole, COLUMNWISE))
    mine = {}
    if sent:
        part = quantizer.make_planes(matrix, rowwise=ROWWISE in sent, columnwise=COLUMNWISE in sent)
        mine = {direction: _plane(part, direction) for direction in sent}
    if ROWWISE in mine:
        used = gathered_plane(mine[ROWWISE], group)
    else:
        whole = _gathered_and_quantized(matrix, quantizer, group, padded.m, rowwise=True, columnwise=False)
        used = _plane(whole, ROWWISE)
    if not wgrad:
        return used, None
    if call.backward_override == "dequantized":
        return used, KeptInput(mine.get(ROWWISE, used), is_part=ROWWISE in mine)
    return used, KeptInput(mine.get(COLUMNWISE, x), is_part=True)


def gathered_for_wgrad(kept: Operand, call: LinearCall, sizes: Sizes, padded: Sizes) -> Operand:
    """x of all ranks, of which `gathered_input` has saved a part."""
    assert call.parallel is not None
    group = call.parallel.group
    if isinstance(kept, Plane):
        return gathered_plane(kept, group)
    matrix = kept.flatten(0, -2).to(call.dtype)
    if not call.quantizes_backward:
        return gathered_rows(matrix, group)
    assert call.input is not None
    matrix = padded_matrix(matrix, matrix.shape[0], padded.k)
    return _plane(_gathered(matrix, call.input, group, padded.m, rowwise=False, columnwise=True), COLUMNWISE)


def gathered_gradient(
    dy: Tensor, call: LinearCall, padded: Sizes, *, rowwise: bool, columnwise: bool
) -> PlaneSource | Tensor:
    """dy of all ranks for the GEMMs of backward."""
    assert call.parallel is not None
    group = call.parallel.group
    if call.grad_output is None or not call.quantizes_backward:
        return padded_matrix(gathered_rows(dy, group), padded.m, padded.n)
    matrix = padded_matrix(dy, dy.shape[0], padded.n)
    return _gathered(matrix, call.grad_output, group, padded.m, rowwise=rowwise, columnwise=columnwise)


def _gathered(
    part: Tensor, quantizer: Quantizer, group: Any, rows: int, *, rowwise: bool, columnwise: bool
) -> PlaneSource:
    """The rows of all ranks, padded to ``rows``. With padding no planes are sent, because it may be part of a block."""
    if rows != part.shape[0] * group_size(group):
        return _gathered_and_quantized(part, quantizer, group, rows, rowwise=rowwise, columnwise=columnwise)
    own = quantizer.storing(rowwise=rowwise, columnwise=columnwise)
    made: PlaneSource = gather_quantized_rows(part, own, group)
    return made


def _gathered_and_quantized(
    part: Tensor, quantizer: Quantizer, group: Any, rows: int, *, rowwise: bool, columnwise: bool
) -> PlaneSource:
    """Gather in high precision, then quantize."""
    matrix = padded_matrix(gathered_rows(part, group), rows, part.shape[1])
    return quantizer.same_on(group).make_planes(matrix, rowwise=rowwise, columnwise=columnwise)


def _same_bytes_again(quantizer: Quantizer) -> bool:
    """Whether planes that are not made in one call have the bytes that one call would have made."""
    return quantizer.storing(rowwise=True, columnwise=True).is_requantization_safe()


def _plane(made: PlaneSource, direction: Direction) -> Plane:
    plane = made.plane(direction)
    assert plane is not None
    return plane
