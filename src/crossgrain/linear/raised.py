"""Multiply chosen operands in high precision although a recipe quantizes them, and leave everything else as it is.

    def choose(operand: QuantizedOperand) -> bool:
        return (operand.layer, operand.name) == ("blocks.3.mlp.fc2", "dgrad.grad_output")

    with raising(choose):
        loss = model(x).sum()
        loss.backward()

All planes are still made: seeds are drawn, amaxes are recorded and scales move as they do without this. Then the chosen
planes are left aside, and their GEMMs multiply the numbers that the planes were made from. A recipe with other formats
could not do this: it would draw other seeds, and lose the histories of delayed scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ..formats import IDENTITY
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane
from ..tensor import QuantizedTensor
from .call import LinearCall
from .operands import GradientOperands, weight_matrix
from .padding import Sizes, padded_matrix
from .saved_planes import KeptInput, Operand

ARRIVES_QUANTIZED = "it arrives quantized, and its numbers before that are not known here"
KEPT_QUANTIZED = "the weight is kept quantized, and the model has no other numbers for it"
SHARED_BY_RANKS = "ranks share the layer"


class QuantizedOperand(NamedTuple):
    """An operand that a GEMM is about to multiply.

    Attributes:
        layer: name of the layer, as recipes know it.
        name: the key of the operand in recipes: "fprop.input", ..., "attention.s".
        plane: the plane that would be multiplied.
        original: the numbers that it was made from: a matrix, padded as the plane is; for attention by heads. None if
            they are not known.
        reason: why they are not known.
    """

    layer: str
    name: str
    plane: Plane
    original: Tensor | None
    reason: str = ""


Choose = Callable[[QuantizedOperand], bool]

chooser: Choose | None = None  # for all threads: backward may run in threads of autograd


@contextmanager
def raising(choose: Choose) -> Iterator[None]:
    """Context manager: show all quantized operands of GEMMs to a function, which chooses those to raise.

    Forward and backward must both be inside. Some operands of backward are shown in forward, when they are saved. In a
    recomputation they are shown again.

    Args:
        choose: returns True for an operand that is to be multiplied in high precision. An operand without known
            original stays as it is.
    """
    global chooser
    outer, chooser = chooser, choose
    try:
        yield
    finally:
        chooser = outer


def is_raised(layer: str, name: str, plane: Plane, original: Tensor | None, reason: str = "") -> bool:
    """Whether an operand is to be multiplied in high precision."""
    if chooser is None or plane.format.is_identity:
        return False
    return chooser(QuantizedOperand(layer, name, plane, original, reason)) and original is not None


class ForwardOperands(NamedTuple):
    """x and W for fprop, and what is saved of them for backward."""

    x_rows: Operand
    x_kept: KeptInput | None
    w_rows: Operand
    w_kept: Operand | None


def in_forward(made: ForwardOperands, x: Tensor, weight: Tensor, call: LinearCall, padded: Sizes) -> ForwardOperands:
    """The operands of forward, with the chosen ones raised."""
    if call.input is None:
        return made
    call.allow_mixed = True  # the two operands of a GEMM may now be scaled differently; nothing else follows from it
    x_original, why_not_x = _original_input(x, call, padded)
    w_original, why_not_w = _original_weight(weight, padded)
    x_rows = _raised(made.x_rows, "fprop.input", call, x_original, why_not_x, ROWWISE)
    w_rows = _raised(made.w_rows, "fprop.weight", call, w_original, why_not_w, ROWWISE)
    x_kept, w_kept = made.x_kept, made.w_kept
    if x_kept is not None and not x_kept.is_part:
        x_kept = KeptInput(_raised(x_kept.operand, "wgrad.input", call, x_original, why_not_x, COLUMNWISE))
    if w_kept is not None:
        w_kept = _raised(w_kept, "dgrad.weight", call, w_original, why_not_w, COLUMNWISE)
    return ForwardOperands(x_rows, x_kept, w_rows, w_kept)


def in_backward(made: GradientOperands, ctx: Any) -> GradientOperands:
    """The operands that are made of dy, with the chosen ones raised."""
    call, padded = ctx.call, ctx.padded
    original, reason = None, ""
    if isinstance(made.plain, QuantizedTensor):
        reason = ARRIVES_QUANTIZED
    elif call.parallel is not None and call.parallel.gathers_gradient:
        reason = SHARED_BY_RANKS
    else:
        original = padded_matrix(made.plain.detach(), padded.m, padded.n)
    return made._replace(
        rows=_raised(made.rows, "dgrad.grad_output", call, original, reason, ROWWISE),
        columns=_raised(made.columns, "wgrad.grad_output", call, original, reason, COLUMNWISE),
    )


def input_made_again(x: Operand, kept: KeptInput, ctx: Any) -> Operand:
    """x for wgrad. If it was saved in high precision, and was quantized again just now, it may be raised now."""
    if not isinstance(kept.operand, Tensor) or kept.is_part:
        return x
    rows = kept.operand.detach().reshape(ctx.sizes.m, ctx.sizes.k).to(ctx.call.dtype)
    return _raised(x, "wgrad.input", ctx.call, padded_matrix(rows, ctx.padded.m, ctx.padded.k), "", COLUMNWISE)


def _original_input(x: Tensor, call: LinearCall, padded: Sizes) -> tuple[Tensor | None, str]:
    if call.parallel is not None and call.parallel.gathers_input:
        return None, SHARED_BY_RANKS
    stands_for_planes = call.quantized_input is not None and not any(x.stride())  # see `hollow_rows`
    if isinstance(x, QuantizedTensor) or stands_for_planes:
        return None, ARRIVES_QUANTIZED
    return padded_matrix(x.detach().reshape(-1, x.shape[-1]).to(call.dtype), padded.m, padded.k), ""


def _original_weight(weight: Tensor, padded: Sizes) -> tuple[Tensor | None, str]:
    return (None, KEPT_QUANTIZED) if isinstance(weight, QuantizedTensor) else (weight_matrix(weight, padded), "")


def _raised(
    operand: Operand, name: str, call: LinearCall, original: Tensor | None, reason: str, direction: Direction
) -> Operand:
    if not isinstance(operand, Plane) or not is_raised(call.product or call.layer, name, operand, original, reason):
        return operand
    assert original is not None
    rows, columns = original.shape
    return Plane(IDENTITY, direction, (rows, columns), original)
