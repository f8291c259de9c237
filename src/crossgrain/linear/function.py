"""The linear layer as an autograd function: three GEMMs, each of which reads one direction of its two operands.

    fprop  y  = x · Wᵀ     reads  x rowwise,     W rowwise
    dgrad  dx = dy · W     reads  dy rowwise,    W columnwise
    wgrad  dW = dyᵀ · x    reads  dy columnwise, x columnwise

Forward makes the rowwise planes of x and W for fprop, and their columnwise planes for backward; it saves only the
latter. Backward makes both planes of dy. The quantizers determine the formats. A plane that no GEMM reads is not made.

Other modules contain how operands are made (`operands`), padding to whole blocks (`padding`), layers that ranks share
(`parallel`, `sequence_parallel`) and where dW goes (`weight_gradient`). Plain layers have a faster way to the same
bits, which is tried first (`planned`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm import gemm
from ..gemm.activations import compute_dtype, wide_dtype
from ..quantizers.identity import IdentityQuantizer
from ..runtime.derivatives import differentiable_once
from ..runtime.failures import telling_others
from . import observer, raised  # their functions are looked up when a layer runs
from .call import LinearCall, Needs, check_dtypes, check_input, check_takes_gradient
from .operands import gradient_operands, input_operands, saved_input, saved_weight, weight_operands
from .padding import Sizes, padded_vector
from .planned import NOT_PLANNED, forward_by_plan, gradients_by_plan
from .probe import probed_gradient
from .saved_planes import KeptInput, Operand, Restored, Saved, restored, save
from .weight_gradient import check_has_main_grad, delivered_weight_gradient


def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs) -> Any:
    """Compute y. What backward needs is saved in ``ctx``, if there is one."""
    check_dtypes(weight, call)
    sizes, padded = call.sizes(x, weight, backward=needs.dx or needs.dw)
    parallel = call.parallel
    planned = forward_by_plan(x, weight, bias, call, needs, sizes, padded)
    if planned.found is not None:
        y, x_kept, w_kept = planned.found
    else:
        with planned.same_seed:
            y, x_kept, w_kept = _fprop(x, weight, bias, call, needs, sizes, padded)

    if ctx is not None:
        save(ctx, Saved(x_kept, w_kept, x, weight, bias, sizes, padded), call, needs)
    if padded != sizes:
        y = y[: sizes.m, : sizes.n].contiguous()
    if call.probe is not None:
        y = call.probe.result("fprop", y)
    shape: tuple[int, ...] = (*x.shape[:-1], sizes.n)
    if parallel is not None:
        y, shape = parallel.output(y, bias, x.shape, call.dtype, call.layer)
    if y.shape != shape or y._is_view():
        # Not a view, so that in-place operations on the output are allowed, as for any layer.
        y = torch.ops.aten._unsafe_view(y, shape)
    return y if call.output is None else call.output(y)


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs, sizes: Sizes, padded: Sizes
) -> tuple[Tensor, KeptInput | None, Operand | None]:
    """Make the operands and multiply them. Returns y with its padding, and what to save of x and W."""
    sums = call.parallel is not None and call.parallel.sums_output  # the bias is added once, to the sum over ranks
    x_rows, x_kept = input_operands(x, call, needs, sizes, padded)
    w_rows, w_kept = weight_operands(weight, call, needs, padded)
    if raised.chooser is not None:
        made = raised.ForwardOperands(x_rows, x_kept, w_rows, w_kept)
        x_rows, x_kept, w_rows, w_kept = raised.in_forward(made, x, weight, call, padded)
    if call.probe is not None:
        call.probe.forward(x, weight, (x_rows, x_kept and x_kept.operand), (w_rows, w_kept))
    y = gemm(
        "fprop",
        x_rows,
        w_rows,
        out_dtype=wide_dtype(call.dtype) if call.wide_output else call.dtype,
        alpha=call.scale,
        bias=None if sums else bias if padded is sizes else padded_vector(bias, padded.n),
        allow_mixed=call.allow_mixed,
    )
    return y, x_kept, w_kept


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dW and db. Those that are not needed are None."""
    call, needs = ctx.call, ctx.needs
    dx = dw = db = None
    planned = NOT_PLANNED
    if needs.dx or needs.dw:
        saved = restored(ctx)
        check_has_main_grad(ctx)
        if call.on_backward is not None:
            call.on_backward()
        planned = gradients_by_plan(dy, saved, ctx)
    if planned.found is not None:
        dx, dw, plain = planned.found
    else:
        with planned.same_seed:
            dy_made = gradient_operands(dy, ctx)
        if raised.chooser is not None:
            dy_made = raised.in_backward(dy_made, ctx)
        dy_rows, dy_columns, plain = dy_made
        if observer.observers and (needs.dx or needs.dw):
            _tell_observers(ctx, saved, plain)
        if call.probe is not None and (needs.dx or needs.dw):
            call.probe.backward(plain, dy_rows, dy_columns)
    if needs.db:
        db = plain.sum(0, dtype=torch.float64 if plain.dtype == torch.float64 else torch.float32).to(ctx.bias_dtype)
    if needs.dx:
        dx = _dgrad(dy_rows, saved, ctx) if dx is None else dx.reshape(ctx.x_shape).to(ctx.x_dtype)
        dx = dx if call.grad_input is None else call.grad_input(dx)
    if needs.dw and planned.found is None:
        dw = _wgrad(dy_columns, saved, ctx)
    return dx, dw, db


def _dgrad(dy_rows: Operand, saved: Restored, ctx: Any) -> Tensor:
    call, sizes = ctx.call, ctx.sizes
    dtype = wide_dtype(call.dtype) if call.wide_gradient else call.dtype
    w = saved_weight(saved.w, ctx)
    dx = gemm("dgrad", dy_rows, w, out_dtype=dtype, alpha=call.gradient_scale, allow_mixed=call.allow_mixed)
    dx = dx[: sizes.m, : sizes.k]
    if call.probe is not None:
        dx = call.probe.result("dgrad", dx)
    if call.parallel is not None and call.parallel.sums_input_gradient:
        dx = call.parallel.sum(dx, call.layer)
    dx = dx.reshape(ctx.x_shape)
    return dx if call.wide_gradient else dx.to(ctx.x_dtype)


def _wgrad(dy_columns: Operand, saved: Restored, ctx: Any) -> Tensor | None:
    """Return dW; None if it does not go through autograd."""
    call, sizes, padded = ctx.call, ctx.sizes, ctx.padded

    def wgrad(dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Compute dW in ``dtype``, or add it to ``out``."""
        x = saved_input(saved.x, ctx)
        if raised.chooser is not None:
            x = raised.input_made_again(x, saved.x, ctx)
        made = gemm(
            "wgrad",
            dy_columns,
            x,
            out_dtype=dtype,
            out=out,
            accumulate=out is not None,
            alpha=call.gradient_scale,
            allow_mixed=call.allow_mixed,
        )
        return made if padded == sizes else made[: sizes.n, : sizes.k]

    compute = wgrad if call.probe is None else probed_gradient(wgrad, call.probe)
    return delivered_weight_gradient(compute, (dy_columns, saved.x.operand), ctx)


def _tell_observers(ctx: Any, saved: Restored, dy: Tensor) -> None:
    weight: Operand | None = saved.w if ctx.needs.dx else None
    if weight is None and ctx.call.weight_parts is None:  # dgrad does not run
        weight = ctx.weight
    name, shown = ctx.call.product or ctx.call.layer, observer.shown
    seen = observer.BackwardOperands(name, shown(saved.x.operand), shown(weight), dy)
    for tell in observer.observers:
        tell(seen)


def visible_gradients(ctx: Any, dy: Tensor) -> Any:
    """`gradients` of a layer that quantizes nothing, in operations that autograd sees; None for other layers."""
    if not ctx.call.is_plain or ctx.w_note is not None:
        return None
    x, _, _, w, *_ = ctx.saved_tensors
    needs, sizes, wide = ctx.needs, ctx.sizes, compute_dtype(dy)
    dy = dy.reshape(sizes.m, sizes.n).to(ctx.call.dtype).to(wide)
    dx = dw = db = None
    if needs.dx:
        product = dy @ w.to(ctx.call.dtype).to(wide)
        dx = product.to(ctx.call.dtype).reshape(ctx.x_shape).to(ctx.x_dtype)
    if needs.dw:
        product = dy.t() @ x.reshape(sizes.m, sizes.k).to(ctx.call.dtype).to(wide)
        dw = product.to(ctx.weight.dtype)
    if needs.db:
        db = dy.sum(0).to(ctx.bias_dtype)
    return dx, dw, db, None, None


class LinearFunction(torch.autograd.Function):
    """The linear layer as an autograd function."""

    forward = staticmethod(forward)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.call.layer, unless=visible_gradients)
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.call.parallel is None:
            return *gradients(ctx, dy), None, None
        with telling_others(f"{ctx.call.layer}, backward"):
            return *gradients(ctx, dy), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Compute ``x · weightᵀ + bias`` with the quantizers of a call.

    Args:
        x: the input [..., K].
        weight: the weight [N, K].
        bias: the bias [N]; None for none.
        call: quantizers and options.

    Raises:
        ValueError: the last dimension of ``x`` is not K.
    """
    check_input(x, weight, call.layer)
    if type(call.input) is IdentityQuantizer:
        call.drop_identities(weight)
    grad = torch.is_grad_enabled()
    needs = Needs(
        grad and x.requires_grad, grad and weight.requires_grad, grad and bias is not None and bias.requires_grad
    )
    if not (needs.dx or needs.dw or needs.db):
        y: Tensor = forward(None, x, weight, bias, call, needs)
        return y
    if needs.dw and call.weight_parts is None and (call.accumulate_main_grad or call.wgrad_queue is not None):
        check_takes_gradient(weight, call.layer)
    result: Tensor = LinearFunction.apply(x, weight, bias, call, needs)
    return result
