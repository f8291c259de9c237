"""Tokens of a mixture of experts on their way to the ranks that have their experts, and back.

Rows are sent as they are, or as rowwise planes: codes and scales of each row, which arrive as what quantizing the rows
after they were sent would give, bit for bit. Scales of the whole tensor are made for the tokens of all ranks. Outputs
and gradients travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..linear.call import activation_dtype
from ..linear.gather_activations import why_places_matter
from ..planes import ROWWISE, Plane
from ..planes.rows import bytes_of_rows, plane_of_rows, rows_stand_alone
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..runtime.collectives import group_size
from ..runtime.failures import communicate, telling_others
from ..tensor import QuantizedTensor


class ExchangedBytes:
    """Exchanges of rows since `count_exchanged_bytes`: ``sizes`` of what arrived, in bytes, and their sum."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def total(self) -> int:
        return sum(self.sizes)


_counts: list[ExchangedBytes] = []


@contextmanager
def count_exchanged_bytes() -> Iterator[ExchangedBytes]:
    """Count what arrives on this rank inside, in forward and backward, also from itself."""
    count = ExchangedBytes()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


def all_to_all_rows(rows: Tensor, sent: Sequence[int], got: Sequence[int], group: Any = None) -> Tensor:
    """``sent[r]`` of the rows go to rank r, in order, and ``got[r]`` come from it. Gradients go back the same way."""
    out: Tensor = _AllToAll.apply(rows, list(sent), list(got), group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _exchanged(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllToAll.apply(grads[0], ctx.got, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(got), *rows.shape[1:])
    if group_size(group) == 1:
        arrived.copy_(rows)
    else:
        communicate(dist.all_to_all_single, arrived, rows.detach().contiguous(), got, sent, group=group)
    for count in _counts:
        count.sizes.append(arrived.numel() * arrived.element_size())
    return arrived


class TokenExchange:
    """Where the tokens of a step go, over the ranks of an expert-parallel ``group``.

    ``counts``  how many rows this rank has for each expert. Ranks have as many experts each, in the order of ranks
    ``sizes``   how many rows there are for each expert of this rank, for `GroupedLinear`

    Every rank of the group takes part in everything, also one without tokens, and in backward.
    """

    def __init__(self, counts: Tensor | Sequence[int], group: Any = None) -> None:
        counts, ranks = torch.as_tensor(counts, dtype=torch.int64).cpu(), group_size(group)
        with telling_others("tokens of experts"):
            if counts.dim() != 1 or counts.numel() % ranks:
                raise ValueError(f"counts {list(counts.shape)} of experts cannot be dealt out to {ranks} ranks")
            if (counts < 0).any():
                raise ValueError(f"there cannot be fewer rows than none for an expert: {counts.tolist()}")
        self.group = group
        here = counts.numel() // ranks
        arriving = counts.clone()
        if ranks > 1:
            communicate(dist.all_to_all_single, arriving, counts, group=group)
        self._sent: list[int] = counts.view(ranks, here).sum(1).tolist()
        self._got: list[int] = arriving.view(ranks, here).sum(1).tolist()
        self.sizes: list[int] = arriving.view(ranks, here).sum(0).tolist()
        # They arrive by rank and then by expert; sorting keeps the order of the ranks within an expert.
        expert = torch.arange(here).repeat(ranks).repeat_interleave(arriving)
        self._by_expert = expert.argsort(stable=True)
        self._by_rank = self._by_expert.argsort()

    def dispatch(self, rows: Tensor, quantizer: Quantizer | None = None) -> Tensor:
        """Of all ranks, the rows for experts of this one, sorted by expert; ``rows`` [M, K] are sorted by expert, too.

        With a ``quantizer`` they are sent as its rowwise planes, and are a quantized tensor with rows alone.
        """
        with telling_others("dispatched tokens"):
            self._check(rows, sum(self._sent), "dispatched")
            if quantizer is None:
                return all_to_all_rows(rows, self._sent, self._got, self.group)[self._by_expert.to(rows.device)]
            out: Tensor = _QuantizedDispatch.apply(rows, self, _row_quantizer(quantizer, self.group))
        return out

    def combine(self, rows: Tensor) -> Tensor:
        """Outputs of the experts, in the order of what `dispatch` returned, back where their tokens came from."""
        with telling_others("combined tokens"):
            self._check(rows, sum(self._got), "combined")
            return all_to_all_rows(rows[self._by_rank.to(rows.device)], self._got, self._sent, self.group)

    def _check(self, rows: Tensor, count: int, done: str) -> None:
        if isinstance(rows, QuantizedTensor):
            raise TypeError(f"rows are {done} as they are or by a quantizer; these are a {type(rows).__name__} already")
        if rows.dim() != 2 or rows.shape[0] != count:
            raise ValueError(f"{count} rows are to be {done}, not a tensor of {list(rows.shape)}")

    def _send_planes(self, plane: Plane) -> Plane:
        arrived = _exchanged(bytes_of_rows(plane), self._sent, self._got, self.group)
        return plane_of_rows(arrived[self._by_expert.to(arrived.device)], plane)

    def _send_back(self, gradient: Tensor) -> Tensor:
        return _exchanged(gradient[self._by_rank.to(gradient.device)], self._got, self._sent, self.group)


class _QuantizedDispatch(torch.autograd.Function):
    """The gradient of quantizing is the identity."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange, quantizer: Quantizer) -> Any:
        ctx.exchange, ctx.dtype = exchange, rows.dtype
        rows = rows.detach().to(activation_dtype(rows))
        plane = quantizer.storing(rowwise=True, columnwise=False).quantize(rows).plane(ROWWISE)
        own = quantizer.copy()
        own.internal = False
        own.set_usage(rowwise=True, columnwise=False)
        return own._holding(exchange._send_planes(plane), rows.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if isinstance(gradient, QuantizedTensor):
            gradient = gradient.dequantize()
        return ctx.exchange._send_back(gradient).to(ctx.dtype), None, None


def _row_quantizer(quantizer: Quantizer, group: Any) -> Quantizer:
    """What makes rows that may be sent one by one, under scales of the rows of all ranks."""
    reason = why_not_sent(quantizer)
    if reason is None and quantizer.with_amax_reduction and quantizer.amax_reduction_group is not group:
        reason = "its amaxes are reduced over other ranks than those that tokens are sent to"
    if reason is not None:
        raise ValueError(f"tokens cannot be sent as rowwise planes of {type(quantizer).__name__}: {reason}")
    row = _of_rows(quantizer)
    return row.reducing(group, axis=0) if group_size(group) > 1 else row


def _of_rows(quantizer: Quantizer) -> Quantizer:
    return quantizer._quantizer_of(ROWWISE) if isinstance(quantizer, HybridQuantizer) else quantizer


def why_not_sent(quantizer: Quantizer) -> str | None:
    """Why rows of what ``quantizer`` makes cannot be sent to different ranks; None if they can."""
    row = _of_rows(quantizer)
    reason = why_places_matter(row, ROWWISE)
    if reason is not None:
        return reason
    fmt = row.encoding(ROWWISE).format
    if not rows_stand_alone(fmt):
        return f"a rowwise {fmt.name} block has {fmt.block_rows} rows, which may be of different experts"
    if any(given is not None for given in row._given()):
        return f"its {fmt.name} scale is given, and need not be the same on all ranks"
    return None
