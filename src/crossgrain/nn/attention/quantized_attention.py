"""Attention in the formats of a recipe. It has six GEMMs, each of which reads one direction of its two operands.

    scores  Q · Kᵀ     reads  Q rowwise,    K rowwise
    output  P · V      reads  P rowwise,    V columnwise
    dV      Pᵀ · dO    reads  P columnwise, dO columnwise
    dP      dO · Vᵀ    reads  dO rowwise,   V rowwise
    dQ      dS · K     reads  dS rowwise,   K columnwise
    dK      dSᵀ · Q    reads  dS columnwise, Q columnwise

P is the softmax of the scores (role "s"), and dS the gradient of the scores (role "dp"). The formats are emulated:
every operand is quantized, its plane is decoded and multiplied in fp32, and the softmax is computed in fp32. So here,
unlike in linear layers, the two operands of a GEMM may have formats that are scaled differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...linear.raised import is_raised
from ...linear.saved_planes import BUFFERS_PER_OPERAND, Operand, buffers_and_note, restored_operand
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane
from ...quantizers.base import Quantizer
from ...recipe.base import BackwardOverride
from ...runtime.derivatives import differentiable_once, entrances
from ...runtime.transforms import refuse_transforms
from .heads import decoded_heads, quantized_heads
from .layout import to_groups, to_heads
from .plain_attention import Attended
from .softmax import largest_by_head, softmax


class AttentionQuantizers(NamedTuple):
    """The quantizers by tensor. ``output`` and ``grad_input`` round the results of attention, if they are given."""

    q: Quantizer
    k: Quantizer
    v: Quantizer
    s: Quantizer
    do: Quantizer
    dp: Quantizer
    output: Quantizer | None = None
    grad_input: Quantizer | None = None

    def reducing(self, group: Any) -> AttentionQuantizers:
        """The quantizers of this rank's heads, if the ranks of ``group`` have the others."""
        given = {name: each for name, each in self._asdict().items() if each is not None}
        return self._replace(**{name: each.reducing(group, axis=0) for name, each in given.items()})


@dataclass
class AttentionCall:
    """Everything about one call except its tensors. With ``calibrating``, tensors are only measured, not quantized.

    With ``wants_max``, the largest score of each head is a second result.
    """

    quantizers: AttentionQuantizers
    scale: float
    dropout: float = 0.0
    wants_max: bool = False
    backward_override: BackwardOverride = None
    calibrating: bool = False
    on_backward: Callable[[], None] | None = None


class Needs(NamedTuple):
    dq: bool
    dk: bool
    dv: bool
    dsink: bool

    @property
    def scores(self) -> bool:
        """Whether backward computes the gradient of the scores."""
        return self.dq or self.dk or self.dsink


def quantized_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: AttentionCall, sink: Tensor | None = None
) -> Attended:
    """Compute attention of q [batch, heads, queries, channels] on k and v [batch, groups, keys, channels].

    ``allowed`` is True where a query may see a key. Queries that may see none give 0. ``sink`` [1, heads, 1, 1] is the
    score of the sink by head; it is in high precision.
    """
    refuse_transforms("quantized attention")
    grad = torch.is_grad_enabled()
    needs = Needs(*(grad and x is not None and x.requires_grad for x in (q, k, v, sink)))
    return Attended(*QuantizedAttention.apply(q, k, v, sink, allowed, call, needs))


class QuantizedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        allowed: Tensor | None,
        call: AttentionCall,
        needs: Needs,
    ) -> tuple[Tensor, Tensor | None]:
        by = call.quantizers
        groups = k.shape[1]
        q_used = _Used("qkv", q, by.q, call, forward=ROWWISE, backward=COLUMNWISE, saved=needs.dk)
        k_used = _Used("qkv", k, by.k, call, forward=ROWWISE, backward=COLUMNWISE, saved=needs.dq)
        v_used = _Used("qkv", v, by.v, call, forward=COLUMNWISE, backward=ROWWISE, saved=needs.scores)
        scores = to_groups(q_used.forward, groups) @ k_used.forward.transpose(-1, -2)
        scores = to_heads(scores, q.shape) * call.scale
        s, sink_part = softmax(scores, allowed, sink)
        max_logit = largest_by_head(scores, allowed) if call.wants_max else None
        keep = None
        p = s
        if call.dropout > 0:
            keep = torch.rand_like(s) >= call.dropout
            p = s * keep / (1 - call.dropout)
        p_used = _Used("s", p, by.s, call, forward=ROWWISE, backward=COLUMNWISE, saved=needs.dv)
        o = to_heads(to_groups(p_used.forward, groups) @ v_used.forward, q.shape).to(q.dtype)
        if by.output is not None:
            o = _rounded("o", o, by.output, call)

        operands = [used.saved for used in (q_used, k_used, v_used, p_used)]
        buffers, ctx.notes = zip(*(buffers_and_note(operand) for operand in operands), strict=True)
        ctx.save_for_backward(
            s if needs.scores else None,
            sink_part if needs.dsink else None,
            keep,
            *(b for three in buffers for b in three),
        )
        ctx.call, ctx.needs = call, needs
        ctx.entrances = entrances(q, k, v, sink)
        ctx.inputs = [(x.shape, x.dtype) for x in (q, k, v)]
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return o, max_logit

    @staticmethod
    @differentiable_once("quantized attention")
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> Any:
        call, needs, (q_like, k_like, v_like) = ctx.call, ctx.needs, ctx.inputs
        by, groups = call.quantizers, k_like[0][1]
        s, sink_part, keep, *buffers = ctx.saved_tensors
        q, k, v, p = (
            restored_operand(tuple(buffers[i * BUFFERS_PER_OPERAND : (i + 1) * BUFFERS_PER_OPERAND]), note)
            for i, note in enumerate(ctx.notes)
        )
        if call.on_backward is not None:
            call.on_backward()
        do_row, do_column = _gradient("do", do, by.do, call, rowwise=needs.scores, columnwise=needs.dv)
        dq = dk = dv = dsink = None
        if needs.dv:
            shape = torch.Size((*q_like[0][:3], k_like[0][2]))
            dv = to_groups(decoded_heads(p, shape), groups).transpose(-1, -2) @ to_groups(do_column, groups)
        if needs.scores:
            v_row = decoded_heads(v, v_like[0])
            dp = to_heads(to_groups(do_row, groups) @ v_row.transpose(-1, -2), q_like[0])
            if keep is not None:
                dp = dp * keep / (1 - call.dropout)
            mean = (dp * s).sum(-1, keepdim=True)
            ds = s * (dp - mean)
            if needs.dsink:
                dsink = -(sink_part * mean).sum((0, 2), keepdim=True)
            if needs.dq or needs.dk:
                ds_row, ds_column = _gradient("dp", ds, by.dp, call, rowwise=needs.dq, columnwise=needs.dk)
            if needs.dq:
                k_column = decoded_heads(k, k_like[0])
                dq = to_heads(to_groups(ds_row, groups) @ k_column, q_like[0]) * call.scale
            if needs.dk:
                q_column = to_groups(decoded_heads(q, q_like[0]), groups)
                dk = to_groups(ds_column, groups).transpose(-1, -2) @ q_column * call.scale
        made = [(dq, q_like), (dk, k_like), (dv, v_like)]
        return *(None if x is None else _leaving(x.to(like[1]), call) for x, like in made), dsink, None, None, None


class _Used:
    """An input of attention: the values that forward multiplies, and what is saved for backward."""

    def __init__(
        self,
        name: str,
        x: Tensor,
        quantizer: Quantizer,
        call: AttentionCall,
        *,
        forward: Direction,
        backward: Direction,
        saved: bool,
    ) -> None:
        x = x.detach()
        self.saved: Operand | None = x if saved else None
        if call.calibrating:
            quantizer.calibrate(x)
            self.forward = x.to(torch.float32)
            return
        both = saved and call.backward_override is None
        made = quantized_heads(
            x, quantizer, rowwise=both or forward is ROWWISE, columnwise=both or forward is COLUMNWISE
        )
        plane = made.plane(forward)
        assert plane is not None
        if _is_raised(name, x, (plane, made.plane(backward)), call):
            self.forward = x.to(torch.float32)
            return
        self.forward = decoded_heads(plane, x.shape)
        if saved and call.backward_override != "high_precision":
            self.saved = plane if call.backward_override == "dequantized" else made.plane(backward)


def _is_raised(name: str, x: Tensor, planes: Sequence[Plane | None], call: AttentionCall) -> bool:
    """Whether a tensor is to stay in high precision, in both directions."""
    quantized = [plane for plane in planes if plane is not None and not plane.format.is_identity]
    return bool(quantized) and is_raised(call.quantizers.q.subject.layer, f"attention.{name}", quantized[0], x)


def _gradient(
    name: str, x: Tensor, quantizer: Quantizer, call: AttentionCall, *, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    """The values of a gradient for the GEMMs that read it rowwise, and for those that read it columnwise."""
    if call.calibrating:
        quantizer.calibrate(x)
    if call.calibrating or call.backward_override is not None:
        values = x.to(torch.float32)
        return values, values
    made = quantized_heads(x, quantizer, rowwise=rowwise, columnwise=columnwise)
    row, column = (made.plane(direction) for direction in (ROWWISE, COLUMNWISE))
    nothing = x.new_empty(0)
    if _is_raised(name, x, (row, column), call):
        return x.to(torch.float32), x.to(torch.float32)
    return (
        nothing if row is None else decoded_heads(row, x.shape),
        nothing if column is None else decoded_heads(column, x.shape),
    )


def _rounded(name: str, x: Tensor, quantizer: Quantizer, call: AttentionCall) -> Tensor:
    """Round ``x`` to the rowwise plane of its quantizer."""
    if call.calibrating:
        quantizer.calibrate(x)
        return x
    plane = quantized_heads(x, quantizer, rowwise=True, columnwise=False).plane(ROWWISE)
    assert plane is not None
    return x if _is_raised(name, x, (plane,), call) else decoded_heads(plane, x.shape).to(x.dtype)


def _leaving(gradient: Tensor, call: AttentionCall) -> Tensor:
    by = call.quantizers
    if by.grad_input is None or call.backward_override is not None:
        return gradient
    return _rounded("dqkv", gradient, by.grad_input, call)
