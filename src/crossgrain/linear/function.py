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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..formats.dtypes import HIGH_PRECISION
from ..gemm import gemm
from ..offload.staying import mark_not_offload
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane
from ..quantizers.base import Quantizer
from ..recipe.base import BackwardOverride
from ..runtime.failures import telling_others
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.sharding import local_part
from .gathered_weight import GatheredWeight
from .gradient_places import (
    add_to_grads,
    added_to_main_grad,
    check_has_main_grad,
    dummy_weight_gradient,
    parts_of_weight,
)
from .padding import NO_PADDING, Padding, Sizes, padded_matrix, padded_vector
from .parallel import TensorParallel
from .saved_planes import BUFFERS_PER_OPERAND, Operand, Unchanged, buffers_and_note, restored_operand
from .sequence_parallel import gathered_for_wgrad, gathered_gradient, gathered_input

Quantized = QuantizedTensorStorage | Tensor


class Needs(NamedTuple):
    """Which gradients are wanted. Known before autograd is entered: inside, gradients are always off."""

    dx: bool
    dw: bool
    db: bool


@dataclass
class LinearCall:
    """All of one call of a linear layer but its tensors.

    ``input``, ``weight``, ``grad_output``  the quantizers; without them the layer computes as the tensors are
    ``output``, ``grad_input``              quantizers of what is handed on, if that is to be quantized
    ``padding``                             what the blocks of these quantizers ask of the sizes
    ``dtype``                               of activations and their gradients
    ``quantized_weight``                    W as cached by the caller, used instead of quantizing it again
    ``quantized_input``                     x, padded, as quantized by the caller together with others
    ``quantized_gradient``                  the same for dy; set before backward
    ``keep_input``                          save x as it is for backward and quantize it again there
    ``on_backward``                         called before backward quantizes anything
    ``wgrad_queue``                         where to put off wgrad to, instead of computing it in backward
    ``accumulate_main_grad``                add dW to ``weight.main_grad``
    ``weight_parts``                        the parameters that W was put together from, if it was
    ``parallel``                            how ranks share the layer, if they do
    """

    dtype: torch.dtype
    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    padding: Padding = NO_PADDING
    quantized_weight: QuantizedTensorStorage | None = None
    quantized_input: QuantizedTensorStorage | None = None
    quantized_gradient: QuantizedTensorStorage | None = None
    backward_override: BackwardOverride = None
    allow_mixed: bool = False
    keep_input: bool = False
    accumulate_main_grad: bool = False
    wgrad_queue: list[Callable[[], None]] | None = None
    on_backward: Callable[[], None] | None = None
    weight_parts: Sequence[Tensor] | None = None
    parallel: TensorParallel | None = None
    layer: str = "Linear"

    @property
    def quantizes_backward(self) -> bool:
        return self.input is not None and self.backward_override is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """``x · weightᵀ + bias`` for x [..., K] and weight [N, K], by the quantizers of ``call``."""
    check_input(x, weight, call.layer)
    grad = torch.is_grad_enabled()
    needs = Needs(
        grad and x.requires_grad, grad and weight.requires_grad, grad and bias is not None and bias.requires_grad
    )
    if not any(needs):
        return _forward(x, weight, bias, call, needs).y
    if needs.dw and call.weight_parts is None and (call.accumulate_main_grad or call.wgrad_queue is not None):
        check_takes_gradient(weight, call.layer)
    result: Tensor = LinearFunction.apply(x, weight, bias, call, needs)
    return result


def check_input(x: Tensor, weight: Tensor, layer: str) -> None:
    """Raise unless ``x`` ends in what ``weight`` takes."""
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{layer}: the input {list(x.shape)} has to end in {weight.shape[-1]}, which is what the weight "
            f"{list(weight.shape)} takes"
        )


def check_dtypes(weight: Tensor, call: LinearCall) -> None:
    """Raise if an operand is to be quantized and is of a dtype that cannot be."""
    if call.input is None:
        return
    for operand, dtype in (("the weight", weight.dtype), ("the input", call.dtype)):
        if dtype not in HIGH_PRECISION:
            raise TypeError(
                f"{call.layer}: {operand} is {dtype}; what is quantized is float32, bfloat16 or float16. Compute in "
                f"{dtype} without a recipe"
            )


def check_takes_gradient(weight: Tensor, layer: str) -> None:
    """A gradient that does not go through autograd ends at this tensor."""
    if not weight.is_leaf:
        raise RuntimeError(
            f"{layer}: the weight was computed from other tensors, and a gradient that is put off or added to "
            "main_grad would not reach them"
        )
    if isinstance(weight, GatheredWeight) or getattr(weight, "_shard", None) is not None:
        raise NotImplementedError(
            f"{layer}: the weight is sharded by FSDP2, which reduces gradients when autograd hands them over; one that "
            "is put off or added to main_grad would not reach the other ranks"
        )


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs) -> Any:
        return saved_forward(ctx, x, weight, bias, call, needs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.call.parallel is None:
            return *gradients(ctx, dy), None, None
        with telling_others(f"{ctx.call.layer}, backward"):
            return *gradients(ctx, dy), None, None


def saved_forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs) -> Any:
    """y; everything for backward goes to ``ctx``."""
    done = _forward(x, weight, bias, call, needs)
    _save(ctx, done, x, weight, bias, call, needs)
    return done.y


def empty_forward(ctx: Any, x: Tensor, weight: Tensor, call: LinearCall, needs: Needs) -> Tensor:
    """The same for compilers, which only ask for sizes: nothing is computed."""
    sizes, padded = (Sizes(*map(int, some)) for some in _sizes(x, weight, call, needs))  # no symbols: a graph per size
    y = x.new_empty((*x.shape[:-1], sizes.n), dtype=call.dtype)
    assert call.input is not None and call.weight is not None
    columnwise = call.quantizes_backward
    for_x = call.input.storing(rowwise=True, columnwise=columnwise and needs.dw and not call.keep_input)
    for_w = call.weight.storing(rowwise=True, columnwise=columnwise and needs.dx)
    x_used = for_x.make_empty((padded.m, padded.k), dtype=call.dtype, device=x.device)
    w_used = for_w.make_empty((padded.n, padded.k), dtype=weight.dtype, device=weight.device)
    x_saved = _input_for_backward(x, x_used, call) if needs.dw else None
    w_saved = _weight_for_backward(weight, w_used, call) if needs.dx else None
    done = _Forward(y, x_saved, w_saved, sizes, padded)
    _save(ctx, done, x, weight, None, call, needs)
    return y


def _save(
    ctx: Any, done: _Forward, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs
) -> None:
    x_buffers, ctx.x_note = buffers_and_note(done.x_saved)
    w_buffers, ctx.w_note = buffers_and_note(done.w_saved)
    if _weight_outlives_graph(weight, call):
        mark_not_offload(*w_buffers)
    ctx.save_for_backward(*x_buffers, *w_buffers)
    call.quantized_weight = None  # backward has its plane; the copy belongs to the cache alone
    call.quantized_input = None
    ctx.call, ctx.needs, ctx.sizes, ctx.padded = call, needs, done.sizes, done.padded
    ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
    ctx.x_is_part = done.x_is_part
    ctx.weight = None
    if needs.dw:  # of a weight that was put together backward asks the shape alone
        ctx.weight = weight if call.weight_parts is None else dummy_weight_gradient(weight)
    ctx.bias_dtype = bias.dtype if bias is not None else None


def _weight_outlives_graph(weight: Tensor, call: LinearCall) -> bool:
    """Whether what is saved of the weight belongs to a parameter or to the cache."""
    if call.weight is not None and not isinstance(weight, QuantizedTensor):
        return call.quantized_weight is not None
    return (weight if weight._base is None else weight._base).is_leaf


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dW and db; those that are not needed are None."""
    call, needs, sizes, padded = ctx.call, ctx.needs, ctx.sizes, ctx.padded
    dx = dw = db = None
    if not _is_quantized_gradient(dy, ctx):
        if isinstance(dy, QuantizedTensor):
            dy = dy.dequantize()
        dy = dy.reshape(math.prod(dy.shape[:-1]), sizes.n).to(call.dtype)
    if needs.db:
        db = dy.sum(0, dtype=_sum_dtype(dy)).to(ctx.bias_dtype)
    if needs.dx or needs.dw:
        saved = ctx.saved_tensors
        x = restored_operand(saved[:BUFFERS_PER_OPERAND], ctx.x_note)
        w = restored_operand(saved[BUFFERS_PER_OPERAND:], ctx.w_note)
        if needs.dw and call.accumulate_main_grad:
            check_has_main_grad(ctx)
        if call.on_backward is not None:
            call.on_backward()
        dy_used: Quantized = dy
        if call.parallel is not None and call.parallel.gathers_gradient:
            dy_used = gathered_gradient(dy, call, padded, rowwise=needs.dx, columnwise=needs.dw)
        elif not isinstance(dy, QuantizedTensor):
            dy_used = _quantized_gradient(padded_matrix(dy, padded.m, padded.n), call, needs)
        if needs.dx:
            dx = _input_gradient(dy_used, w, ctx)
        if needs.dw:
            dw = _weight_gradient(dy_used, x, ctx)
    return dx, dw, db


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


# ---- forward -----------------------------------------------------------------------------------------


class _Forward(NamedTuple):
    y: Tensor
    x_saved: Operand | None
    w_saved: Operand | None
    sizes: Sizes
    padded: Sizes
    x_is_part: bool = False  # what is saved of x: this rank's rows


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs) -> _Forward:
    check_dtypes(weight, call)
    sizes, padded = _sizes(x, weight, call, needs)
    parallel = call.parallel
    sums = parallel is not None and parallel.sums_output  # the bias is added once, to the sum over ranks
    x_used, x_saved, x_is_part = _input_operands(x, call, needs, sizes, padded)
    w_used = _quantized_weight(weight, call, padded, columnwise=needs.dx)
    y = gemm(
        "fprop",
        _operand(x_used, ROWWISE, "input", call),
        _operand(w_used, ROWWISE, "weight", call),
        out_dtype=call.dtype,
        bias=None if sums else padded_vector(bias, padded.n),
        allow_mixed=call.allow_mixed,
    )
    w_saved = _weight_for_backward(weight, w_used, call) if needs.dx else None
    if padded != sizes:
        y = y[: sizes.m, : sizes.n].contiguous()
    shape: Sequence[int] = (*x.shape[:-1], sizes.n)
    if parallel is not None:
        shape = parallel.output_shape(x.shape, sizes.n)
        if sums:
            y = parallel.sum(y, call.layer)
            y = y if bias is None else (y + bias.detach()).to(call.dtype)
    # Not a view: in-place operations on the output are fine, as they are for any layer.
    y = torch.ops.aten._unsafe_view(y, shape)
    y = y if call.output is None else call.output(y)
    return _Forward(y, x_saved, w_saved, sizes, padded, x_is_part)


def _input_operands(
    x: Tensor, call: LinearCall, needs: Needs, sizes: Sizes, padded: Sizes
) -> tuple[Quantized | Operand, Operand | None, bool]:
    """x for fprop, what wgrad needs of it, and whether that is only this rank's part."""
    if call.parallel is not None and call.parallel.gathers_input:
        matrix = x.dequantize(dtype=call.dtype) if isinstance(x, QuantizedTensor) else x
        return gathered_input(matrix.detach(), call, sizes, padded, wgrad=needs.dw)
    used = _quantized_input(x, call, sizes, padded, columnwise=needs.dw and not call.keep_input)
    return used, _input_for_backward(x, used, call) if needs.dw else None, False


def _sizes(x: Tensor, weight: Tensor, call: LinearCall, needs: Needs) -> tuple[Sizes, Sizes]:
    """As they are, and padded."""
    rows = math.prod(x.shape[:-1])
    if call.parallel is not None:
        call.parallel.check(x.shape, call.layer)
        rows *= call.parallel.size if call.parallel.gathers_input else 1
    sizes = Sizes(rows, x.shape[-1], weight.shape[0])
    return sizes, call.padding.padded(sizes, backward=needs.dx or needs.dw)


def quantized_storage(quantizer: Quantizer, tensor: Tensor, rowwise: bool, columnwise: bool) -> QuantizedTensorStorage:
    """A bare storage with these directions; the module's quantizer keeps its own settings."""
    own = quantizer.storing(rowwise=rowwise, columnwise=columnwise)
    made: QuantizedTensorStorage = own.quantize(tensor)
    return made


def _quantized_input(x: Tensor, call: LinearCall, sizes: Sizes, padded: Sizes, columnwise: bool) -> Quantized:
    if call.quantized_input is not None:
        return call.quantized_input
    columnwise = columnwise and call.quantizes_backward
    if isinstance(x, QuantizedTensor):
        if call.input is not None and padded == sizes and _made_alike(x, call.input, True, columnwise):
            return x
        x = x.dequantize(dtype=call.dtype)
    matrix = x.detach().reshape(sizes.m, sizes.k).to(call.dtype)
    if call.input is None:
        return matrix
    return quantized_storage(call.input, padded_matrix(matrix, padded.m, padded.k), True, columnwise)


def _made_alike(x: QuantizedTensor, quantizer: Quantizer, rowwise: bool, columnwise: bool) -> bool:
    """Whether a tensor that comes quantized holds what ``quantizer`` would make of it."""
    if quantizer.custom or quantizer.derives_columns:
        return False
    directions = [direction for direction, wanted in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if wanted]
    planes = [(x.plane(direction), quantizer.encoding(direction).format) for direction in directions]
    return all(plane is not None and plane.format == fmt for plane, fmt in planes)


def _quantized_weight(weight: Tensor, call: LinearCall, padded: Sizes, columnwise: bool) -> Quantized:
    columnwise = columnwise and call.quantizes_backward
    if isinstance(weight, QuantizedTensor):
        return _usable_weight(weight, call, padded, columnwise)
    if call.weight is None:
        return weight.detach().to(call.dtype)
    if call.quantized_weight is not None:
        return call.quantized_weight
    return quantize_weight(weight, call.weight, padded, columnwise)


def quantize_weight(weight: Tensor, quantizer: Quantizer, padded: Sizes, columnwise: bool) -> QuantizedTensorStorage:
    """W for fprop, and for dgrad if ``columnwise``."""
    plain = local_part(weight.detach())
    return quantized_storage(quantizer, padded_matrix(plain, padded.n, padded.k), True, columnwise)


def _usable_weight(weight: QuantizedTensor, call: LinearCall, padded: Sizes, columnwise: bool) -> Quantized:
    """A weight that is kept quantized: a missing direction is asked for, none is ever dropped."""
    if call.weight is None:
        return weight.dequantize(dtype=call.dtype).detach()
    if tuple(weight.shape) != (padded.n, padded.k):
        raise ValueError(
            f"{call.layer}: the weight {list(weight.shape)} is kept quantized and cannot be padded to "
            f"{[padded.n, padded.k]}, which the other operands' blocks ask for"
        )
    for direction in (ROWWISE, COLUMNWISE) if columnwise else (ROWWISE,):
        if weight.plane(direction) is not None:
            continue
        try:
            with torch.inference_mode(False):  # the weight outlives the inference that asks first
                weight.update_usage(**{f"{direction.value}_usage": True})
        except Exception as error:
            raise RuntimeError(
                f"{call.layer}: the quantized weight {list(weight.shape)} has no {direction.value} plane, which "
                f"{'fprop' if direction is ROWWISE else 'dgrad'} reads: {error}"
            ) from error
    return weight


def _operand(used: Quantized | Operand, direction: Direction, role: str, call: LinearCall) -> Operand:
    if not isinstance(used, QuantizedTensorStorage):
        return used
    plane = used.plane(direction)
    if plane is None:
        raise RuntimeError(f"{call.layer}: {role} holds no {direction.value} plane")
    return plane


def _input_for_backward(x: Tensor, used: Quantized, call: LinearCall) -> Operand:
    if call.input is None or call.keep_input or call.backward_override == "high_precision":
        return x.dequantize(dtype=call.dtype).detach() if isinstance(x, QuantizedTensor) else x.detach()
    return _operand(used, ROWWISE if call.backward_override == "dequantized" else COLUMNWISE, "input", call)


def _weight_for_backward(weight: Tensor, used: Quantized, call: LinearCall) -> Operand:
    if call.weight is None or call.backward_override == "high_precision":
        return weight._readable_plane(None) if isinstance(weight, QuantizedTensor) else weight.detach()
    return _operand(used, ROWWISE if call.backward_override == "dequantized" else COLUMNWISE, "weight", call)


# ---- backward ----------------------------------------------------------------------------------------


def _is_quantized_gradient(dy: Tensor, ctx: Any) -> bool:
    """Whether dy comes as the layer would quantize it; a bias gradient is a sum of what it was before."""
    call, needs = ctx.call, ctx.needs
    return (
        isinstance(dy, QuantizedTensor)
        and call.grad_output is not None
        and call.quantizes_backward
        and not needs.db
        and ctx.padded == ctx.sizes
        and not (call.parallel is not None and call.parallel.gathers_gradient)
        and _made_alike(dy, call.grad_output, needs.dx, needs.dw)
    )


def _quantized_gradient(dy: Tensor, call: LinearCall, needs: Needs) -> Quantized:
    if call.quantized_gradient is not None:
        return call.quantized_gradient
    if call.grad_output is None or not call.quantizes_backward:
        return dy
    return quantized_storage(call.grad_output, dy, needs.dx, needs.dw)


def _saved_operand(
    saved: Operand | None, call: LinearCall, rows: int, columns: int, padded: tuple[int, int]
) -> Operand:
    """What backward multiplies by: the columnwise plane, or high precision where there is no such plane."""
    assert saved is not None
    if isinstance(saved, Plane):
        if call.quantizes_backward:
            return saved
        return padded_matrix(kernels.decode(saved, call.dtype), *padded)
    return padded_matrix(saved.reshape(rows, columns).to(call.dtype), *padded)


def _input_gradient(dy: Quantized, w: Operand | None, ctx: Any) -> Tensor:
    call, sizes, padded = ctx.call, ctx.sizes, ctx.padded
    dx = gemm(
        "dgrad",
        _operand(dy, ROWWISE, "grad_output", call),
        _saved_operand(w, call, sizes.n, sizes.k, (padded.n, padded.k)),
        out_dtype=call.dtype,
        allow_mixed=call.allow_mixed,
    )
    dx = dx[: sizes.m, : sizes.k]
    if call.parallel is not None and call.parallel.sums_input_gradient:
        dx = call.parallel.sum(dx, call.layer)
    dx = dx.reshape(ctx.x_shape).to(ctx.x_dtype)
    return dx if call.grad_input is None else call.grad_input(dx)


def _weight_gradient(dy: Quantized, x: Operand | None, ctx: Any) -> Tensor | None:
    """dW for autograd, or None if it goes elsewhere or is put off."""
    call, weight = ctx.call, ctx.weight
    dy_operand = _operand(dy, COLUMNWISE, "grad_output", call)
    assert x is not None

    def compute(dtype: torch.dtype, out: Tensor | None) -> Tensor:
        return _wgrad(dy_operand, x, ctx, dtype, out)

    def delivered() -> Tensor | None:
        return added_to_main_grad(compute, ctx) if call.accumulate_main_grad else compute(weight.dtype, None)

    if call.wgrad_queue is None:
        return delivered()
    unchanged = Unchanged(dy_operand, x)

    def later() -> None:
        unchanged.check(call.layer)
        with torch.no_grad():
            dw = delivered()
            if dw is not None:
                add_to_grads(parts_of_weight(ctx), dw)

    call.wgrad_queue.append(later)
    return None


def _wgrad(dy: Operand, x: Operand, ctx: Any, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    call, sizes, padded = ctx.call, ctx.sizes, ctx.padded
    if ctx.x_is_part:
        x = gathered_for_wgrad(x, call, sizes, padded)
    x = _saved_operand(x, call, sizes.m, sizes.k, (padded.m, padded.k))
    if call.quantizes_backward and isinstance(x, Tensor):
        assert call.input is not None
        x = _operand(quantized_storage(call.input, x, False, True), COLUMNWISE, "input", call)
    dw = gemm("wgrad", dy, x, out_dtype=dtype, out=out, accumulate=out is not None, allow_mixed=call.allow_mixed)
    return dw if padded == sizes else dw[: sizes.n, : sizes.k]
