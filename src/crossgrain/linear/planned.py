"""A step of a plain linear layer by two plans: one for forward, one for backward (see `kernels.step_plan`).

Small layers spend most of their time in Python. A plan encodes all operands of forward or of backward and prepares the
products, in one or two calls of compiled code. It gives the bits of the general way, which is in `function`, and is for
plain layers only: one process, nobody looks on, all three GEMMs run, whole blocks, finite numbers. In any other case
nothing is found, and the general way is taken. If that turns out after a seed was drawn, because there is a NaN or an
infinity, the general way draws the same one. Nothing is converted or copied before it is known that there is a plan.

What forward saves does not depend on the way, so either half can be planned without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .. import kernels
from ..gemm.planned import may_be_planned, multiplied_by_plan, suits_plan
from ..kernels import HalfStep, ProductOf
from ..planes import COLUMNWISE, Plane
from ..quantizers import observer as plane_observer
from ..quantizers.subject import Subject
from ..quantizers.writing import Layout
from ..runtime.random_numbers import draw_seed, seed_again
from . import observer, raised
from .call import LinearCall, Needs
from .padding import Sizes
from .saved_planes import KeptInput, Restored

_ROWS_GO, _NOTHING_STAYS = (False, True), (False, False)


class PlannedForward(NamedTuple):
    """The result of forward [M, N], and the columnwise planes of x and W to save."""

    y: Tensor
    x: KeptInput
    w: Plane


class PlannedGradients(NamedTuple):
    """dx [M, K], dW [N, K], and dy as a matrix."""

    dx: Tensor
    dw: Tensor
    dy: Tensor


class Attempt(NamedTuple):
    """What came of a plan.

    Attributes:
        found: the results; None if there are none.
        same_seed: a context in which the general way draws the seed that the plan has drawn.
    """

    found: Any
    same_seed: AbstractContextManager[None]


NOT_PLANNED = Attempt(None, nullcontext())
"""No plan was tried."""


def forward_by_plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, needs: Needs, sizes: Sizes, padded: Sizes
) -> Attempt:
    """Try to compute y by a plan. What is found is a `PlannedForward`."""
    if (
        not (needs.dx and needs.dw)
        or padded is not sizes
        or call.quantized_weight is not None
        or call.quantized_input is not None
        or call.keep_input
        or call.wide_output
        or call.scale != 1.0
        or call.input is None
        or call.weight is None
        or not _is_plain(call)
    ):
        return NOT_PLANNED
    x, w = x.detach(), weight.detach()
    if type(x) is not Tensor or type(w) is not Tensor or not x.is_cpu or not w.is_cpu:
        return NOT_PLANNED
    x_layout = call.input.layout_for_step((sizes.m, sizes.k))
    w_layout = None if x_layout is None else call.weight.layout_for_step((sizes.n, sizes.k))
    if x_layout is None or w_layout is None or w_layout.stochastic:
        return NOT_PLANNED  # x may be refused before a seed for W is drawn
    scales = (  # only quantizers that observe amaxes may give one
        call.input.scale_for_step() if x_layout.observes else None,
        call.weight.scale_for_step() if w_layout.observes else None,
    )
    recorded = call.input.amax if x_layout.observes else None  # type: ignore[attr-defined]
    if recorded is not None and scales[1] is not None and recorded.data_ptr() == scales[1].data_ptr():
        return NOT_PLANNED  # the amax of x is recorded where the scale of W is then read
    key = "forward", id(w_layout), call.dtype, w.dtype

    def what() -> HalfStep:
        x_made = x_layout.for_step(_matrix(x, sizes.m, call), _ROWS_GO, scales[0])
        w_made = w_layout.for_step(w, _ROWS_GO, scales[1])
        suits = suits_plan("fprop", x_made.planes[0], w_made.planes[0], call.dtype)
        return HalfStep((x_made, w_made), (), (ProductOf(0, 2),) if suits else ())

    plan = kernels.step_plan(x, key, x_layout.step_plans, what, w_layout)
    if plan is None or not plan.is_for_one_thread():
        return NOT_PLANNED
    matrices = _matrix(x, sizes.m, call), w
    if not plan.suits(matrices, scales, ()):
        return NOT_PLANNED
    seed = draw_seed(_subject(call.input)) if x_layout.stochastic else None
    device = w.device
    kept = x_layout.empty_columnwise(device), w_layout.empty_columnwise(device)
    results = ((sizes.m, sizes.n, call.dtype),)
    bias = None if bias is None else bias.detach()
    record = partial(_record, ((call.input, x_layout), (call.weight, w_layout)))
    made = multiplied_by_plan(plan, matrices, scales, kept, (), (seed, None), results, bias, record)
    if made is None:
        return _to_repeat(call.input, seed)
    return Attempt(PlannedForward(made[0], KeptInput(kept[0]), kept[1]), NOT_PLANNED.same_seed)


def gradients_by_plan(dy: Tensor, saved: Restored, ctx: Any) -> Attempt:
    """Try to compute dx and dW by a plan. What is found are `PlannedGradients`.

    Args:
        dy: the gradient of the output.
        saved: the planes that forward has saved.
        ctx: the ``ctx`` of the linear function.
    """
    call, needs, sizes = ctx.call, ctx.needs, ctx.sizes
    x, w = saved.x.operand, saved.w
    if (
        not (needs.dx and needs.dw)
        or ctx.padded is not sizes
        or saved.x.is_part
        or call.grad_output is None
        or call.quantized_gradient is not None
        or call.accumulate_main_grad
        or call.wgrad_queue is not None
        or call.wide_gradient
        or call.gradient_scale != 1.0
        or not _is_plain(call)
        or not (isinstance(x, Plane) and x.direction is COLUMNWISE)
        or not (isinstance(w, Plane) and w.direction is COLUMNWISE)
        or observer.observers
        or type(dy) is not Tensor
    ):
        return NOT_PLANNED
    layout = call.grad_output.layout_for_step((sizes.m, sizes.n)) if dy.is_cpu else None
    if layout is None:
        return NOT_PLANNED
    scales = (call.grad_output.scale_for_step() if layout.observes else None,)
    key = "backward", sizes.k, call.dtype, ctx.weight.dtype, id(x.format), x.transposed, id(w.format), w.transposed

    def what() -> HalfStep:
        made = layout.for_step(_matrix(dy.detach(), sizes.m, call), _NOTHING_STAYS, scales[0])
        rows, columns = made.planes
        suits = suits_plan("dgrad", rows, w, call.dtype) and suits_plan("wgrad", columns, x, ctx.weight.dtype)
        return HalfStep((made,), (w, x), (ProductOf(0, 2), ProductOf(1, 3)) if suits else ())

    plan = kernels.step_plan(dy, key, layout.step_plans, what, (x.format, w.format))
    if plan is None or not plan.is_for_one_thread():
        return NOT_PLANNED
    matrix = _matrix(dy.detach(), sizes.m, call)
    if not plan.suits((matrix,), scales, (w, x)):
        return NOT_PLANNED
    seed = draw_seed(_subject(call.grad_output)) if layout.stochastic else None
    results = (sizes.m, sizes.k, call.dtype), (sizes.n, sizes.k, ctx.weight.dtype)
    record = partial(_record, ((call.grad_output, layout),))
    made = multiplied_by_plan(plan, (matrix,), scales, (), (w, x), (seed,), results, record=record)
    if made is None:
        return _to_repeat(call.grad_output, seed)
    return Attempt(PlannedGradients(made[0], made[1], matrix), NOT_PLANNED.same_seed)


def _is_plain(call: LinearCall) -> bool:
    """Whether nobody looks on, and backward reads quantized operands of this process."""
    return (
        call.parallel is None
        and call.probe is None
        and call.backward_override is None
        and not call.allow_mixed
        and raised.chooser is None
        and not plane_observer.observers
        and may_be_planned()
    )


def _matrix(tensor: Tensor, rows: int, call: LinearCall) -> Tensor:
    """x or dy as the general way quantizes it."""
    return tensor.reshape(rows, tensor.shape[-1]).to(call.dtype)


def _record(makers: Sequence[tuple[Any, Layout]], numbers: Sequence[float]) -> None:
    """Give quantizers that record them the amax and the scale of their matrices."""
    for at, (quantizer, layout) in enumerate(makers):
        if layout.observes:
            quantizer.record(*numbers[2 * at : 2 * at + 2])


def _subject(quantizer: Any) -> Subject:
    """What the seed of planes that are made together is drawn for: the subject of the first of their quantizers."""
    found: Subject = quantizer.plain_quantizers()[0].subject
    return found


def _to_repeat(quantizer: Any, seed: int | None) -> Attempt:
    return NOT_PLANNED if seed is None else Attempt(None, seed_again(_subject(quantizer), seed))
