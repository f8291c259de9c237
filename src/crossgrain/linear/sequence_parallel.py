"""Operands of which each rank has some rows: gathered for a GEMM, as planes where that gives the same bytes.

What wgrad needs of x is kept as this rank's rows and gathered again in backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE, Plane
from ..quantizers.base import Quantizer
from ..runtime.collectives import gathered_rows, group_size
from ..tensor import QuantizedTensorStorage
from .gather_activations import gather_quantized_rows, gathered_plane, why_not_gathered
from .padding import Sizes, padded_matrix
from .saved_planes import Operand

if TYPE_CHECKING:
    from .function import LinearCall


class GatheredInput(NamedTuple):
    """x of all ranks for fprop, and what is kept of it for wgrad: of this rank's rows, or of all."""

    used: Operand
    kept: Operand | None
    keeps_part: bool = True


def gathered_input(x: Tensor, call: LinearCall, sizes: Sizes, padded: Sizes, *, wgrad: bool) -> GatheredInput:
    """``x``, in high precision, has the rows of this rank; ``sizes`` are those of all."""
    assert call.parallel is not None
    group, quantizer = call.parallel.group, call.input
    matrix = x.flatten(0, -2).to(call.dtype)
    if quantizer is None:
        return GatheredInput(gathered_rows(matrix, group), x if wgrad else None)
    matrix = padded_matrix(matrix, matrix.shape[0], padded.k)
    columns = wgrad and call.quantizes_backward and not call.keep_input
    wanted = [ROWWISE, COLUMNWISE] if columns else [ROWWISE]
    possible = [ROWWISE, COLUMNWISE] if padded.m == sizes.m else [ROWWISE]  # fprop needs no padding of M, wgrad does
    sent = [d for d in wanted if d in possible and why_not_gathered(quantizer, d, matrix.shape[0]) is None]
    if columns and COLUMNWISE not in sent and not _same_bytes_again(quantizer):
        whole = _gathered_and_quantized(matrix, quantizer, group, padded.m, rowwise=True, columnwise=True)
        return GatheredInput(_plane(whole, ROWWISE), _plane(whole, COLUMNWISE), keeps_part=False)
    mine = {}
    if sent:
        part = quantizer.storing(rowwise=ROWWISE in sent, columnwise=COLUMNWISE in sent).quantize(matrix)
        mine = {direction: _plane(part, direction) for direction in sent}
    if ROWWISE in mine:
        used = gathered_plane(mine[ROWWISE], group)
    else:
        whole = _gathered_and_quantized(matrix, quantizer, group, padded.m, rowwise=True, columnwise=False)
        used = _plane(whole, ROWWISE)
    if not wgrad:
        return GatheredInput(used, None)
    if call.backward_override == "dequantized":
        return GatheredInput(used, mine.get(ROWWISE, used), keeps_part=ROWWISE in mine)
    return GatheredInput(used, mine.get(COLUMNWISE, x))


def gathered_for_wgrad(kept: Operand, call: LinearCall, sizes: Sizes, padded: Sizes) -> Operand:
    """x of all ranks, of which `gathered_input` kept a part."""
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
) -> QuantizedTensorStorage | Tensor:
    """dy of all ranks for the GEMMs of backward."""
    assert call.parallel is not None
    group = call.parallel.group
    if call.grad_output is None or not call.quantizes_backward:
        return padded_matrix(gathered_rows(dy, group), padded.m, padded.n)
    matrix = padded_matrix(dy, dy.shape[0], padded.n)
    return _gathered(matrix, call.grad_output, group, padded.m, rowwise=rowwise, columnwise=columnwise)


def _gathered(
    part: Tensor, quantizer: Quantizer, group: Any, rows: int, *, rowwise: bool, columnwise: bool
) -> QuantizedTensorStorage:
    """The rows of all ranks, padded to ``rows``. Where there is padding no planes travel: it may fill a block up."""
    if rows != part.shape[0] * group_size(group):
        return _gathered_and_quantized(part, quantizer, group, rows, rowwise=rowwise, columnwise=columnwise)
    own = quantizer.storing(rowwise=rowwise, columnwise=columnwise)
    made: QuantizedTensorStorage = gather_quantized_rows(part, own, group)
    return made


def _gathered_and_quantized(
    part: Tensor, quantizer: Quantizer, group: Any, rows: int, *, rowwise: bool, columnwise: bool
) -> QuantizedTensorStorage:
    """In high precision first."""
    matrix = padded_matrix(gathered_rows(part, group), rows, part.shape[1])
    made: QuantizedTensorStorage = quantizer.storing(rowwise=rowwise, columnwise=columnwise).quantize(matrix)
    return made


def _same_bytes_again(quantizer: Quantizer) -> bool:
    """Whether columns made in backward are those that forward would have made."""
    return quantizer.storing(rowwise=False, columnwise=True).is_requantization_safe()


def _plane(storage: QuantizedTensorStorage, direction: Any) -> Plane:
    plane = storage.plane(direction)
    assert plane is not None
    return plane
