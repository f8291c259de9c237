"""A linear layer for the tracer of a compiler, which needs only shapes: nothing is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .call import LinearCall, Needs
from .operands import kept_input, kept_weight
from .padding import Sizes
from .saved_planes import KeptInput, Saved, save


def empty_forward(ctx: Any, x: Tensor, weight: Tensor, call: LinearCall, needs: Needs) -> Tensor:
    """`function.forward` for tensors without memory: returns y, and saves in ``ctx`` what backward would need."""
    both = call.sizes(x, weight, backward=needs.dx or needs.dw)
    sizes, padded = (Sizes(*map(int, some)) for some in both)  # numbers, not symbols: one graph for each size
    y = x.new_empty((*x.shape[:-1], sizes.n), dtype=call.dtype)
    assert call.input is not None and call.weight is not None
    columnwise = call.quantizes_backward
    for_x = call.input.storing(rowwise=True, columnwise=columnwise and needs.dw and not call.keep_input)
    for_w = call.weight.storing(rowwise=True, columnwise=columnwise and needs.dx)
    x_made = for_x.make_empty((padded.m, padded.k), dtype=call.dtype, device=x.device)
    w_made = for_w.make_empty((padded.n, padded.k), dtype=weight.dtype, device=weight.device)
    x_kept = KeptInput(kept_input(x, x_made, call)) if needs.dw else None
    w_kept = kept_weight(weight, w_made, call) if needs.dx else None
    save(ctx, Saved(x_kept, w_kept, x, weight, None, sizes, padded), call, needs)
    return y
