"""Where the gradient of a weight goes: to autograd, to ``main_grad``, or, when it is computed later, to ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planes import Plane

ComputeGradient = Callable[[torch.dtype, Tensor | None], Tensor]
"""Of the weight, in a dtype; added to a tensor, if there is one."""


def parts_of_weight(ctx: Any) -> Sequence[Tensor]:
    """The parameters that the gradient of the weight belongs to, from the top down."""
    return ctx.call.weight_parts or [ctx.weight]


def delivered_weight_gradient(compute: ComputeGradient, operands: Sequence[Plane | Tensor], ctx: Any) -> Tensor | None:
    """dW for autograd; None if it goes elsewhere, or is computed when `backward_dw` is called.

    Args:
        compute: The GEMM.
        operands: What it multiplies, which must not be changed until it runs.
        ctx: Of the linear function.
    """
    call = ctx.call

    def delivered() -> Tensor | None:
        return added_to_main_grad(compute, ctx) if call.accumulate_main_grad else compute(ctx.weight.dtype, None)

    if call.wgrad_queue is None:
        return delivered()
    unchanged = Unchanged(*operands)

    def later() -> None:
        unchanged.check(call.layer)
        with torch.no_grad():
            dw = delivered()
            if dw is not None:
                add_to_grads(parts_of_weight(ctx), dw)

    call.wgrad_queue.append(later)
    return None


class Unchanged:
    """Notices in-place writes to operands that are kept beyond the graph, where autograd no longer looks."""

    def __init__(self, *operands: Plane | Tensor) -> None:
        buffers = [buffer for operand in operands for buffer in _buffers(operand)]
        self._seen = [(buffer, buffer._version) for buffer in buffers if not buffer.is_inference()]

    def check(self, layer: str) -> None:
        if any(buffer._version != version for buffer, version in self._seen):
            raise RuntimeError(
                f"{layer}: a tensor that the weight gradient needs was changed in place before backward_dw() was called"
            )


def _buffers(operand: Plane | Tensor) -> list[Tensor]:
    return operand.buffers() if isinstance(operand, Plane) else [operand]


def check_has_main_grad(ctx: Any) -> None:
    """Raise rather than fail halfway through backward."""
    if not (ctx.needs.dw and ctx.call.accumulate_main_grad):
        return
    if not all(isinstance(getattr(part, "main_grad", None), Tensor) for part in parts_of_weight(ctx)):
        raise RuntimeError(
            f"{ctx.call.layer}: fuse_wgrad_accumulation adds the weight gradient to weight.main_grad, and the weight "
            "has no main_grad. Give it one, a float32 tensor of its shape, before backward."
        )


def added_to_main_grad(compute: ComputeGradient, ctx: Any) -> Tensor | None:
    """Add dW to ``main_grad``; for those who wait for a gradient, returns one without content.

    A weight with ``overwrite_main_grad`` says that what is there is of another step, and is not to be added to.
    """
    parts: Any = parts_of_weight(ctx)
    for part in parts:
        if getattr(part, "overwrite_main_grad", False):
            part.main_grad.zero_()
    if len(parts) == 1 and ctx.padded[1:] == ctx.sizes[1:]:
        compute(torch.float32, parts[0].main_grad)
    else:
        dw = compute(torch.float32, None)
        for part, rows in zip(parts, dw.split([len(part) for part in parts]), strict=True):
            part.main_grad.add_(rows)
    waiting = [part for part in parts if hasattr(part, "grad_added_to_main_grad")]
    for part in waiting:
        part.grad_added_to_main_grad = True
    return dummy_weight_gradient(ctx.weight) if waiting else None


def add_to_grads(parts: Sequence[Tensor], dw: Tensor) -> None:
    """As autograd does it: the first gradient is kept, later ones are added in place."""
    pieces = [dw] if len(parts) == 1 else [piece.clone() for piece in dw.split([len(part) for part in parts])]
    for part, piece in zip(parts, pieces, strict=True):
        if part.grad is None:
            part.grad = piece
        else:
            part.grad.add_(piece)


def dummy_weight_gradient(weight: Tensor) -> Tensor:
    """A gradient without memory, for those who wait for one while the real one is in ``main_grad``."""
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
    return zero.expand(weight.shape)
