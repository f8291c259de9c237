"""Make the operands of the three GEMMs: planes of x, W and dy.

An operand is a `Plane`, or a plain tensor in high precision. x and dy may be plain tensors, quantized tensors, planes
that were made for several layers at once, or a rank's share of the rows. W may be in high precision, kept quantized,
cached, or gathered.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, PlanePair, PlaneSource
from ..quantizers.base import Quantizer
from ..tensor import QuantizedTensor
from ..tensor.sharding import local_part
from .call import LinearCall, Needs
from .padding import Sizes, padded_matrix
from .saved_planes import KeptInput, Operand
from .sequence_parallel import gathered_for_wgrad, gathered_gradient, gathered_input

Made = PlaneSource | Tensor  # what an operand is taken from


def of_direction(made: Made, direction: Direction, tensor: str, call: LinearCall) -> Operand:
    """The operand for a GEMM that reads ``made`` in ``direction``."""
    if isinstance(made, Tensor) and not isinstance(made, QuantizedTensor):
        return made
    if isinstance(made, PlanePair):
        plane = made.rowwise if direction is ROWWISE else made.columnwise
    else:
        plane = made.plane(direction)
    if plane is None:
        raise RuntimeError(
            f"{call.layer}: the quantized {tensor} has no {direction.value} plane, which a GEMM of this layer reads"
        )
    return plane


def _plane_kept(made: Made, quantizer: Quantizer, tensor: str, call: LinearCall) -> Operand:
    """What is kept for backward: columns, or rows if backward decodes them or makes columns from them."""
    rows = call.backward_override == "dequantized"
    if quantizer.makes_columns_late and (isinstance(made, QuantizedTensor) or not isinstance(made, Tensor)):
        rows = rows or made.plane(COLUMNWISE) is None
    return of_direction(made, ROWWISE if rows else COLUMNWISE, tensor, call)


# ---- x ---------------------------------------------------------------------------------------------------


def input_operands(
    x: Tensor, call: LinearCall, needs: Needs, sizes: Sizes, padded: Sizes
) -> tuple[Operand, KeptInput | None]:
    """x for fprop, and what is saved of it for wgrad."""
    if call.parallel is not None and call.parallel.gathers_input:
        matrix = x.dequantize(dtype=call.dtype) if isinstance(x, QuantizedTensor) else x
        return gathered_input(matrix.detach(), call, sizes, padded, wgrad=needs.dw)
    columnwise = needs.dw and not call.keep_input and call.makes_columns(call.input)
    made = _made_input(x, call, sizes, padded, columnwise)
    rows = of_direction(made, ROWWISE, "input", call)
    return rows, KeptInput(kept_input(x, made, call)) if needs.dw else None


def _made_input(x: Tensor, call: LinearCall, sizes: Sizes, padded: Sizes, columnwise: bool) -> Made:
    if call.quantized_input is not None:
        return call.quantized_input
    if isinstance(x, QuantizedTensor):
        if call.input is not None and padded == sizes and made_alike(x, call.input, True, columnwise):
            return x
        x = x.dequantize(dtype=call.dtype)
    matrix = x.detach().reshape(sizes.m, sizes.k).to(call.dtype)
    if call.input is None:
        return matrix
    if padded is not sizes:
        matrix = padded_matrix(matrix, padded.m, padded.k)
    return call.input.make_planes(matrix, rowwise=True, columnwise=columnwise)


def kept_input(x: Tensor, made: Made, call: LinearCall) -> Operand:
    """What is saved of x for wgrad."""
    if call.input is None or call.keep_input or call.backward_override == "high_precision":
        if isinstance(x, QuantizedTensor):
            return x.dequantize(dtype=call.dtype).detach()
        return x if call.is_plain else x.detach()  # a gradient of the gradient goes through x itself
    return _plane_kept(made, call.input, "input", call)


def made_alike(x: QuantizedTensor, quantizer: Quantizer, rowwise: bool, columnwise: bool) -> bool:
    """Whether a quantized tensor has planes in the formats that ``quantizer`` makes."""
    if quantizer.custom or quantizer.derives_columns:
        return False
    directions = [direction for direction, wanted in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if wanted]
    planes = [(x.plane(direction), quantizer.encoding(direction).format) for direction in directions]
    return all(plane is not None and plane.format == fmt for plane, fmt in planes)


def saved_input(kept: KeptInput, ctx: Any) -> Operand:
    """x for wgrad, from what forward has saved."""
    call, sizes, padded = ctx.call, ctx.sizes, ctx.padded
    x = gathered_for_wgrad(kept.operand, call, sizes, padded) if kept.is_part else kept.operand
    if isinstance(x, Plane) and x.direction is ROWWISE and call.quantizes_backward:  # columns are made late
        columns: Operand = call.input.columns_of_plane(x, call.dtype)
        return columns
    x = _for_backward(x, call, sizes.m, sizes.k, (padded.m, padded.k))
    if call.quantizes_backward and isinstance(x, Tensor):
        return of_direction(call.input.make_planes(x, rowwise=False, columnwise=True), COLUMNWISE, "input", call)
    return x


# ---- W ---------------------------------------------------------------------------------------------------


def weight_operands(weight: Tensor, call: LinearCall, needs: Needs, padded: Sizes) -> tuple[Operand, Operand | None]:
    """W for fprop, and what is saved of it for dgrad."""
    made = _made_weight(weight, call, padded, needs.dx and call.makes_columns(call.weight))
    rows = of_direction(made, ROWWISE, "weight", call)
    return rows, kept_weight(weight, made, call) if needs.dx else None


def _made_weight(weight: Tensor, call: LinearCall, padded: Sizes, columnwise: bool) -> Made:
    if isinstance(weight, QuantizedTensor):
        return usable_weight(weight, call, padded, columnwise)
    if call.weight is None:
        return weight.detach().to(call.dtype)
    if call.quantized_weight is not None:
        return call.quantized_weight
    return call.weight.make_planes(weight_matrix(weight, padded), rowwise=True, columnwise=columnwise)


def weight_matrix(weight: Tensor, padded: Sizes) -> Tensor:
    """The matrix to quantize for a weight: this rank's part, padded with zeros to whole blocks."""
    matrix = weight.detach()
    if type(matrix) is not Tensor:
        matrix = local_part(matrix)
    return matrix if matrix.shape == (padded.n, padded.k) else padded_matrix(matrix, padded.n, padded.k)


def usable_weight(weight: QuantizedTensor, call: LinearCall, padded: Sizes, columnwise: bool) -> Made:
    """A weight that is kept quantized, with the directions that are needed. A missing one is made; none is dropped.

    Raises:
        ValueError: the weight would have to be padded.
        RuntimeError: a missing direction cannot be made.
    """
    if call.weight is None:
        return weight.dequantize(dtype=call.dtype).detach()
    if tuple(weight.shape) != (padded.n, padded.k):
        raise ValueError(
            f"{call.layer}: the weight {list(weight.shape)} is kept quantized and cannot be padded to "
            f"{[padded.n, padded.k]}, which the blocks of the other operands need. Choose sizes that are multiples of "
            "the blocks, or keep the weight in high precision."
        )
    for direction in (ROWWISE, COLUMNWISE) if columnwise else (ROWWISE,):
        if weight.plane(direction) is not None:
            continue
        try:
            with torch.inference_mode(False):  # the weight may be trained after this inference
                weight.update_usage(**{f"{direction.value}_usage": True})
        except Exception as error:
            raise RuntimeError(
                f"{call.layer}: the quantized weight {list(weight.shape)} has no {direction.value} plane, which "
                f"{'fprop' if direction is ROWWISE else 'dgrad'} reads: {error} (Weights that were made under a recipe "
                "with backward_override have only rows: crossgrain.requantize_(model, recipe) makes both.)"
            ) from error
    return weight


def kept_weight(weight: Tensor, made: Made, call: LinearCall) -> Operand:
    """What is saved of W for dgrad."""
    if call.weight is None or call.backward_override == "high_precision":
        if isinstance(weight, QuantizedTensor):
            return weight._readable_plane(None)
        return weight if call.is_plain else weight.detach()
    return _plane_kept(made, call.weight, "weight", call)


def saved_weight(kept: Operand, ctx: Any) -> Operand:
    """W for dgrad, from what forward has saved. Columns that are made late from a cached copy stay in the copy."""
    sizes, padded, shared = ctx.sizes, ctx.padded, ctx.shared_weight
    if isinstance(kept, Plane) and kept.direction is ROWWISE and ctx.call.quantizes_backward:
        if shared is None:
            columns: Operand = ctx.call.weight.columns_of_plane(kept, ctx.weight_dtype)
            return columns
        with torch.inference_mode(False):
            shared.update_usage(columnwise_usage=True)
        return of_direction(shared, COLUMNWISE, "weight", ctx.call)
    return _for_backward(kept, ctx.call, sizes.n, sizes.k, (padded.n, padded.k))


def _for_backward(kept: Operand, call: LinearCall, rows: int, columns: int, padded: tuple[int, int]) -> Operand:
    """A saved operand for backward: a columnwise plane as it is, or decoded if backward does not quantize."""
    if isinstance(kept, Plane):
        return kept if call.quantizes_backward else padded_matrix(kernels.decode(kept, call.dtype), *padded)
    return padded_matrix(kept.reshape(rows, columns).to(call.dtype), *padded)


# ---- dy --------------------------------------------------------------------------------------------------


class GradientOperands(NamedTuple):
    """dy for dgrad (rows) and wgrad (columns), and as a plain matrix for the gradient of the bias."""

    rows: Any
    columns: Any
    plain: Tensor


def gradient_operands(dy: Tensor, ctx: Any) -> GradientOperands:
    """Both operands of dy; None for a GEMM that does not run."""
    call, needs = ctx.call, ctx.needs
    if _comes_quantized(dy, ctx):
        made: Made = dy
    else:
        if isinstance(dy, QuantizedTensor):
            dy = dy.dequantize()
        dy = dy.reshape(math.prod(dy.shape[:-1]), ctx.sizes.n).to(call.dtype)
        if not (needs.dx or needs.dw):
            return GradientOperands(None, None, dy)
        made = _made_gradient(dy, ctx)
    return GradientOperands(
        of_direction(made, ROWWISE, "grad_output", call) if needs.dx else None,
        of_direction(made, COLUMNWISE, "grad_output", call) if needs.dw else None,
        dy,
    )


def _comes_quantized(dy: Tensor, ctx: Any) -> bool:
    """Whether dy is already quantized as the layer would do it. Not with a bias, whose gradient needs the numbers."""
    call, needs = ctx.call, ctx.needs
    return (
        isinstance(dy, QuantizedTensor)
        and call.grad_output is not None
        and call.quantizes_backward
        and not needs.db
        and ctx.padded == ctx.sizes
        and not (call.parallel is not None and call.parallel.gathers_gradient)
        and made_alike(dy, call.grad_output, needs.dx, needs.dw)
    )


def _made_gradient(dy: Tensor, ctx: Any) -> Made:
    call, needs, padded = ctx.call, ctx.needs, ctx.padded
    if call.parallel is not None and call.parallel.gathers_gradient:
        return gathered_gradient(dy, call, padded, rowwise=needs.dx, columnwise=needs.dw)
    if call.quantized_gradient is not None:
        given: Made = call.quantized_gradient
        return given
    matrix = dy if padded is ctx.sizes else padded_matrix(dy, padded.m, padded.n)
    if call.grad_output is None or not call.quantizes_backward:
        return matrix
    made: Made = call.grad_output.make_planes(matrix, rowwise=needs.dx, columnwise=needs.dw)
    return made
