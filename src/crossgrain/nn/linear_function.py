"""The linear layer in autograd: three GEMMs, each reading one direction of its two operands.

    fprop  y  = x · Wᵀ     reads  x rowwise,     W rowwise
    dgrad  dx = dy · W     reads  dy rowwise,    W columnwise
    wgrad  dW = dyᵀ · x    reads  dy columnwise, x columnwise

So forward quantizes x and W rowwise for itself and columnwise for backward, keeps only the columnwise
planes, and backward quantizes dy. Which formats these are is the quantizers' business. A direction that
no GEMM will read is never made.

Sizes that do not divide into blocks are padded with zeros, which add nothing to any sum, and cut off
again: real rows and columns get the numbers they would get without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm import gemm
from ..plane import COLUMNWISE, ROWWISE, Direction, Plane, round_up
from ..quantizer import Quantizer
from ..recipe.base import BackwardOverride
from ..tensor import QuantizedTensor, QuantizedTensorStorage, prepare_for_saving, restore_from_func_ctx


class Sizes(NamedTuple):
    """Of x [M, K], W [N, K] and dy [M, N]."""

    m: int
    k: int
    n: int


@dataclass
class LinearCall:
    """All of one call of a linear layer but its tensors.

    ``input``, ``weight``, ``grad_output``  the quantizers; without them the layer computes as the tensors are
    ``output``, ``grad_input``              quantizers of what is handed on, if that is to be quantized
    ``dtype``                               of activations and their gradients
    ``quantized_weight``                    W as cached by the caller, used instead of quantizing it again
    ``keep_input``                          save x as it is for backward and quantize it again there
    ``on_backward``                         called before backward quantizes anything
    ``wgrad_queue``                         where to put off wgrad to, instead of computing it in backward
    ``accumulate_main_grad``                add dW to ``weight.main_grad``
    """

    dtype: torch.dtype
    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    quantized_weight: QuantizedTensorStorage | None = None
    backward_override: BackwardOverride = None
    allow_mixed: bool = False
    keep_input: bool = False
    accumulate_main_grad: bool = False
    wgrad_queue: list[Callable[[], None]] | None = None
    on_backward: Callable[[], None] | None = None
    layer: str = "Linear"

    @property
    def quantizes_backward(self) -> bool:
        return self.input is not None and self.backward_override is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """``x · weightᵀ + bias`` for x [..., K] and weight [N, K], by the quantizers of ``call``."""
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{call.layer}: the input {list(x.shape)} ends in {x.shape[-1]}, but the weight {list(weight.shape)} "
            f"takes {weight.shape[-1]} features"
        )
    result: Tensor = LinearFunction.apply(x, weight, bias, call)
    return result


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Any:
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        sizes = Sizes(math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0])
        padded = padded_sizes(sizes, call, needs_dx, needs_dw)

        x_used = _quantized_input(x, call, padded, columnwise=needs_dw and not call.keep_input)
        w_used = _quantized_weight(weight, call, padded, columnwise=needs_dx)
        y = gemm(
            "fprop",
            _operand(x_used, ROWWISE, "input", call),
            _operand(w_used, ROWWISE, "weight", call),
            out_dtype=call.dtype,
            bias=_padded_vector(bias, padded.n),
            allow_mixed=call.allow_mixed,
        )
        if needs_dx or needs_dw:
            x_saved = _input_for_backward(x, x_used, call, padded) if needs_dw else None
            w_saved = _weight_for_backward(weight, w_used, call) if needs_dx else None
            tensors, ctx.tensor_objects = prepare_for_saving(x_saved, w_saved)
            ctx.save_for_backward(*tensors)
        ctx.call, ctx.sizes, ctx.padded = call, sizes, padded
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.weight = weight if needs_dw else None
        ctx.bias_dtype = bias.dtype if needs_db and bias is not None else None
        y = y[: sizes.m, : sizes.n].reshape(*x.shape[:-1], sizes.n)
        return y if call.output is None else call.output(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        call, sizes, padded = ctx.call, ctx.sizes, ctx.padded
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        x: Any = None
        w: Any = None
        dx = dw = db = None
        if needs_dx or needs_dw:
            x, w = restore_from_func_ctx(ctx)
        if isinstance(dy, QuantizedTensor):
            dy = dy.dequantize()
        dy = dy.reshape(sizes.m, sizes.n).to(call.dtype)
        if needs_db and ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if needs_dx or needs_dw:
            if call.on_backward is not None:
                call.on_backward()
            dy_used = _quantized_gradient(_padded_matrix(dy, padded.m, padded.n), call, needs_dx, needs_dw)
        if needs_dx:
            dx = _input_gradient(dy_used, w, call, ctx)
        if needs_dw:
            dw = _weight_gradient(dy_used, x, call, ctx)
        return dx, dw, db, None


# ---- forward -----------------------------------------------------------------------------------------


def _made_by(quantizer: Quantizer, tensor: Tensor, rowwise: bool, columnwise: bool) -> QuantizedTensorStorage:
    """A bare storage with these directions; the module's quantizer keeps its own settings."""
    own = quantizer.copy()
    own.set_usage(rowwise=rowwise, columnwise=columnwise)
    own.internal = True
    made: QuantizedTensorStorage = own.quantize(tensor)
    return made


def _quantized_input(x: Tensor, call: LinearCall, padded: Sizes, columnwise: bool) -> QuantizedTensorStorage | Tensor:
    if isinstance(x, QuantizedTensor):
        x = x.dequantize(dtype=call.dtype)
    matrix = _padded_matrix(x.detach().reshape(-1, x.shape[-1]).to(call.dtype), padded.m, padded.k)
    if call.input is None:
        return matrix
    return _made_by(call.input, matrix, True, columnwise and call.quantizes_backward)


def _quantized_weight(
    weight: Tensor, call: LinearCall, padded: Sizes, columnwise: bool
) -> QuantizedTensorStorage | Tensor:
    columnwise = columnwise and call.quantizes_backward
    if isinstance(weight, QuantizedTensor):
        return _usable_weight(weight, call, padded, columnwise)
    if call.weight is None:
        return weight.detach()
    if call.quantized_weight is not None:
        return call.quantized_weight
    return quantize_weight(weight, call.weight, padded, columnwise)


def quantize_weight(weight: Tensor, quantizer: Quantizer, padded: Sizes, columnwise: bool) -> QuantizedTensorStorage:
    """W for fprop, and for dgrad if ``columnwise``."""
    return _made_by(quantizer, _padded_matrix(weight.detach(), padded.n, padded.k), True, columnwise)


def _usable_weight(
    weight: QuantizedTensor, call: LinearCall, padded: Sizes, columnwise: bool
) -> QuantizedTensorStorage | Tensor:
    """A weight that is kept quantized: a missing direction is asked for, none is ever dropped."""
    if call.weight is None:
        return weight.dequantize().detach()
    if tuple(weight.shape) != (padded.n, padded.k):
        raise ValueError(
            f"{call.layer}: the weight {list(weight.shape)} is kept quantized and cannot be padded to "
            f"{[padded.n, padded.k]}, which the other operands' blocks ask for"
        )
    missing = [
        direction
        for direction, wanted in ((ROWWISE, True), (COLUMNWISE, columnwise))
        if wanted and weight.plane(direction) is None
    ]
    for direction in missing:
        try:
            weight.update_usage(**{f"{direction.value}_usage": True})
        except Exception as error:
            raise RuntimeError(
                f"{call.layer}: the quantized weight {list(weight.shape)} has no {direction.value} plane, which "
                f"{'fprop' if direction is ROWWISE else 'dgrad'} reads: {error}"
            ) from error
    return weight


def _operand(
    used: QuantizedTensorStorage | Tensor, direction: Direction, role: str, call: LinearCall
) -> Plane | Tensor:
    if not isinstance(used, QuantizedTensorStorage):
        return used
    plane = used.plane(direction)
    if plane is None:
        raise RuntimeError(f"{call.layer}: {role} holds no {direction.value} plane")
    return plane


def _input_for_backward(
    x: Tensor, used: QuantizedTensorStorage | Tensor, call: LinearCall, padded: Sizes
) -> QuantizedTensorStorage | Tensor:
    if call.input is None or call.keep_input or call.backward_override == "high_precision":
        kept = x.dequantize(dtype=call.dtype) if isinstance(x, QuantizedTensor) else x
        return kept.detach()
    assert isinstance(used, QuantizedTensorStorage)
    return used if call.backward_override == "dequantized" else _columns_of(used)


def _weight_for_backward(
    weight: Tensor, used: QuantizedTensorStorage | Tensor, call: LinearCall
) -> QuantizedTensorStorage | Tensor:
    if call.weight is None or call.backward_override == "high_precision":
        return weight.detach()  # for a quantized weight another wrapper: saving empties what is saved
    assert isinstance(used, QuantizedTensorStorage)
    with torch.no_grad():
        mine = used is not call.quantized_weight and not isinstance(used, QuantizedTensor)
        kept = used if mine else used._rewrap()  # saving empties what is saved
    return kept if call.backward_override == "dequantized" else _columns_of(kept)


def _columns_of(made: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """Backward reads the columnwise plane only: the rowwise bytes are let go."""
    made.update_usage(rowwise_usage=False)
    return made


# ---- backward ----------------------------------------------------------------------------------------


def _quantized_gradient(
    dy: Tensor, call: LinearCall, rowwise: bool, columnwise: bool
) -> QuantizedTensorStorage | Tensor:
    if call.grad_output is None or not call.quantizes_backward:
        return dy
    return _made_by(call.grad_output, dy, rowwise, columnwise)


def _saved_operand(
    saved: QuantizedTensorStorage | Tensor, role: str, call: LinearCall, rows: int, columns: int
) -> Plane | Tensor:
    """What backward multiplies by: the columnwise plane, or high precision where there is no such plane."""
    if not isinstance(saved, QuantizedTensorStorage):
        return _padded_matrix(saved.detach().reshape(-1, saved.shape[-1]).to(call.dtype), rows, columns)
    if call.backward_override is not None or call.weight is None:
        return _padded_matrix(saved.dequantize(dtype=call.dtype).detach(), rows, columns)
    return _operand(saved, COLUMNWISE, role, call)


def _input_gradient(
    dy: QuantizedTensorStorage | Tensor, w: QuantizedTensorStorage | Tensor, call: LinearCall, ctx: Any
) -> Tensor:
    dx = gemm(
        "dgrad",
        _operand(dy, ROWWISE, "grad_output", call),
        _saved_operand(w, "weight", call, ctx.padded.n, ctx.padded.k),
        out_dtype=call.dtype,
        allow_mixed=call.allow_mixed,
    )
    dx = dx[: ctx.sizes.m, : ctx.sizes.k].reshape(ctx.x_shape).to(ctx.x_dtype)
    return dx if call.grad_input is None else call.grad_input(dx)


def _weight_gradient(
    dy: QuantizedTensorStorage | Tensor, x: QuantizedTensorStorage | Tensor, call: LinearCall, ctx: Any
) -> Tensor | None:
    weight, sizes, padded = ctx.weight, ctx.sizes, ctx.padded
    if call.wgrad_queue is not None:
        dy = _columns_of(dy) if isinstance(dy, QuantizedTensorStorage) else dy

    def compute(out: Tensor | None = None) -> Tensor:
        if call.keep_input and call.quantizes_backward:
            assert isinstance(x, Tensor) and call.input is not None
            matrix = _padded_matrix(x.reshape(-1, sizes.k).to(call.dtype), padded.m, padded.k)
            used: Any = _operand(_made_by(call.input, matrix, False, True), COLUMNWISE, "input", call)
        else:
            used = _saved_operand(x, "input", call, padded.m, padded.k)
        fits = out is not None and padded[1:] == sizes[1:]
        dw = gemm(
            "wgrad",
            _operand(dy, COLUMNWISE, "grad_output", call),
            used,
            out_dtype=weight.dtype if out is None else torch.float32,
            out=out if fits else None,
            accumulate=fits,
            allow_mixed=call.allow_mixed,
        )
        if out is not None and not fits:
            out.add_(dw[: sizes.n, : sizes.k])
        return dw[: sizes.n, : sizes.k]

    def deliver() -> Tensor | None:
        if not call.accumulate_main_grad:
            return compute()
        compute(out=weight.main_grad)
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            return dummy_weight_gradient(weight)
        return None

    if call.wgrad_queue is None:
        return deliver()

    def later() -> None:
        with torch.no_grad():
            dw = deliver()
        if dw is not None:
            weight.grad = dw if weight.grad is None else weight.grad + dw

    call.wgrad_queue.append(later)
    return None


def dummy_weight_gradient(weight: Tensor) -> Tensor:
    """A gradient without memory, for those who wait for one while the real one is in ``main_grad``."""
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
    return zero.expand(weight.shape)


# ---- padding -----------------------------------------------------------------------------------------


def padded_sizes(sizes: Sizes, call: LinearCall, needs_dx: bool, needs_dw: bool) -> Sizes:
    """The sizes up to whole blocks, of the planes that this call will make."""
    if call.input is None or call.weight is None:
        return sizes
    backward = call.quantizes_backward and call.grad_output is not None
    x, w, dy = ("m", "k"), ("n", "k"), ("m", "n")
    planes: list[tuple[Any, Direction, tuple[str, str]]] = [(call.input, ROWWISE, x), (call.weight, ROWWISE, w)]
    if backward and needs_dw:
        planes += [(call.input, COLUMNWISE, x), (call.grad_output, COLUMNWISE, dy)]
    if backward and needs_dx:
        planes += [(call.weight, COLUMNWISE, w), (call.grad_output, ROWWISE, dy)]
    multiples = {"m": 1, "k": 1, "n": 1}
    for quantizer, direction, (rows, columns) in planes:
        if quantizer.custom:
            continue
        fmt = quantizer.encoding(direction).format
        if fmt.block is None or fmt.ragged:
            continue
        summed, other = (columns, rows) if direction is ROWWISE else (rows, columns)
        multiples[summed] = math.lcm(multiples[summed], fmt.block_length)
        multiples[other] = math.lcm(multiples[other], fmt.block_rows)
    return Sizes(*(round_up(size, multiples[name]) for name, size in sizes._asdict().items()))


def _padded_matrix(matrix: Tensor, rows: int, columns: int) -> Tensor:
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    padding = (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
    return torch.nn.functional.pad(matrix, padding)


def _padded_vector(vector: Tensor | None, size: int) -> Tensor | None:
    if vector is None or vector.shape[0] == size:
        return vector
    return torch.nn.functional.pad(vector, (0, size - vector.shape[0]))
