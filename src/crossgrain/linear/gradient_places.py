"""Where the gradient of a weight goes when autograd does not take it: to ``main_grad``, or later to ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ComputeGradient = Callable[[torch.dtype, Tensor | None], Tensor]
"""Of the weight, in a dtype; added to a tensor, if there is one."""


def parts_of_weight(ctx: Any) -> Sequence[Tensor]:
    """The parameters that the gradient of the weight belongs to, from the top down."""
    return ctx.call.weight_parts or [ctx.weight]


def check_has_main_grad(ctx: Any) -> None:
    """Raise rather than fail halfway through backward."""
    if not all(isinstance(getattr(part, "main_grad", None), Tensor) for part in parts_of_weight(ctx)):
        raise RuntimeError(f"{ctx.call.layer}: fuse_wgrad_accumulation adds to weight.main_grad, and there is none")


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
