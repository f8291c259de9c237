"""Where the gradient of a weight goes: to autograd, to ``main_grad``, or, if it is computed later, to ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planes import Plane

ComputeGradient = Callable[[torch.dtype, Tensor | None], Tensor]
"""A function that computes the gradient in a dtype, or adds it to a tensor if there is one."""


def parts_of_weight(ctx: Any) -> Sequence[Tensor]:
    """The parameters of which the weight consists, in the order of their rows."""
    return ctx.call.weight_parts or [ctx.weight]


def delivered_weight_gradient(compute: ComputeGradient, operands: Sequence[Plane | Tensor], ctx: Any) -> Tensor | None:
    """Return dW for autograd; None if it is added to ``main_grad``, or computed later by `backward_dw`.

    Args:
        compute: the GEMM.
        operands: its operands, which must not be changed until it runs.
        ctx: the ``ctx`` of the linear function.
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
    """Detects in-place writes to operands that are kept after backward, when autograd no longer checks them."""

    def __init__(self, *operands: Plane | Tensor) -> None:
        buffers = [buffer for operand in operands for buffer in _buffers(operand)]
        self._seen = [(buffer, buffer._version) for buffer in buffers if not buffer.is_inference()]

    def check(self, layer: str) -> None:
        """Raise RuntimeError if an operand was changed."""
        if any(buffer._version != version for buffer, version in self._seen):
            raise RuntimeError(
                f"{layer}: a tensor that is needed for the weight gradient was changed in place before backward_dw() "
                "was called"
            )


def _buffers(operand: Plane | Tensor) -> list[Tensor]:
    return operand.buffers() if isinstance(operand, Plane) else [operand]


def check_has_main_grad(ctx: Any) -> None:
    """Raise RuntimeError if a ``main_grad`` is needed and missing, before backward has computed anything."""
    if not (ctx.needs.dw and ctx.call.accumulate_main_grad):
        return
    if not all(isinstance(getattr(part, "main_grad", None), Tensor) for part in parts_of_weight(ctx)):
        raise RuntimeError(
            f"{ctx.call.layer}: fuse_wgrad_accumulation adds the weight gradient to weight.main_grad, but the weight "
            "has no main_grad. Set it to a float32 tensor of the shape of the weight before backward."
        )


def added_to_main_grad(compute: ComputeGradient, ctx: Any) -> Tensor | None:
    """Add dW to ``main_grad``, which is set to zero first if the weight has ``overwrite_main_grad``.

    Returns:
        A gradient without content, if a weight has the attribute ``grad_added_to_main_grad``; otherwise None.
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
    """Add dW to ``grad``, as autograd does: the first gradient is stored, later ones are added in place."""
    pieces = [dw] if len(parts) == 1 else [piece.clone() for piece in dw.split([len(part) for part in parts])]
    for part, piece in zip(parts, pieces, strict=True):
        if part.grad is None:
            part.grad = piece
        else:
            part.grad.add_(piece)


def dummy_weight_gradient(weight: Tensor) -> Tensor:
    """A gradient without memory, for code that needs one although the real gradient is in ``main_grad``."""
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
    return zero.expand(weight.shape)
