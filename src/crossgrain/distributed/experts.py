"""`TokenExchange`: send the tokens of a mixture of experts to the ranks of their experts, and the outputs back.

Rows are sent unquantized, or quantized as rowwise planes, that is codes and scales of each row. The planes that arrive
are, bit for bit, those that quantizing the rows after sending would give. A scale for the whole tensor is computed from
the tokens of all ranks. Outputs and gradients are sent unquantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..linear.call import activation_dtype
from ..linear.grouped_input import quantizer_of_rows, why_not_sent
from ..planes import ROWWISE, Plane
from ..planes.rows import bytes_of_rows, plane_of_rows
from ..quantizers.base import Quantizer
from ..runtime.collectives import collective_device, group_size
from ..runtime.derivatives import differentiable_once, entrances
from ..runtime.failures import communicate, telling_others
from ..tensor import QuantizedTensor


class ExchangedBytes:
    """The result of `count_exchanged_bytes`.

    Attributes:
        sizes: for each exchange, the number of bytes that arrived on this rank.
        total: their sum.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def total(self) -> int:
        return sum(self.sizes)


_counts: list[ExchangedBytes] = []


@contextmanager
def count_exchanged_bytes() -> Iterator[ExchangedBytes]:
    """Context manager that counts the bytes that arrive on this rank, in forward and backward, also from itself.

    Examples:
        >>> exchange = cg.distributed.TokenExchange([3, 1])
        >>> with cg.distributed.count_exchanged_bytes() as count:
        ...     arrived = exchange.dispatch(torch.randn(4, 32), cg.quantizer_for("mxfp8"))
        >>> count.total  # 32 codes and a scale for each of 4 rows
        132
    """
    count = ExchangedBytes()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


def all_to_all_rows(rows: Tensor, sent: Sequence[int], got: Sequence[int], group: Any = None) -> Tensor:
    """Exchange rows between all ranks of a group. Gradients travel the opposite way.

    Args:
        rows: the rows to send, ordered by the rank they go to.
        sent: how many rows go to each rank.
        got: how many rows come from each rank.
        group: the process group; None for the default group.

    Returns:
        The rows that arrived, ordered by the rank they come from.

    Examples:
        >>> rows = torch.tensor([[1.0], [2.0], [3.0]])
        >>> cg.distributed.all_to_all_rows(rows, sent=[3], got=[3])  # one rank sends to itself
        tensor([[1.],
                [2.],
                [3.]])
    """
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
    """Sends the tokens of one step to the ranks of their experts, and the outputs back.

    Every rank of the group must call all methods and run backward, also a rank without tokens.

    Args:
        counts: how many rows this rank has for each expert of all ranks. Every rank has the same number of experts; the
            first experts are on rank 0. If they are on a GPU, the host waits for them.
        group: the expert-parallel process group; None for the default group.

    Attributes:
        sizes: how many rows arrive for each expert of this rank; pass them to `GroupedLinear`.

    Raises:
        ValueError: ``counts`` cannot be divided among the ranks, or has a negative number.

    Examples:
        >>> experts = cg.GroupedLinear(2, 32, 32)
        >>> exchange = cg.distributed.TokenExchange([3, 1])  # 3 tokens for the first expert, 1 for the second
        >>> with cg.autocast(recipe="mxfp8"):
        ...     arrived = exchange.dispatch(torch.randn(4, 32))
        ...     out = exchange.combine(experts(arrived, exchange.sizes))
        >>> out.shape
        torch.Size([4, 32])
    """

    def __init__(self, counts: Tensor | Sequence[int], group: Any = None) -> None:
        counts, ranks = torch.as_tensor(counts, dtype=torch.int64, device="cpu"), group_size(group)
        with telling_others("tokens of experts"):
            if counts.dim() != 1 or counts.numel() % ranks:
                raise ValueError(
                    f"counts has shape {list(counts.shape)}, but it must have one number for each expert, and the "
                    f"number of experts must be a multiple of the {ranks} ranks"
                )
            if (counts < 0).any():
                raise ValueError(f"counts, the rows for each expert, must be >= 0, got {counts.tolist()}")
        self.group = group
        here = counts.numel() // ranks
        arriving = counts.clone()
        if ranks > 1:
            sent = counts.to(collective_device(group))
            there = torch.empty_like(sent)
            communicate(dist.all_to_all_single, there, sent, group=group)
            arriving = there.to("cpu")
        self._sent: list[int] = counts.view(ranks, here).sum(1).tolist()
        self._got: list[int] = arriving.view(ranks, here).sum(1).tolist()
        self.sizes: list[int] = arriving.view(ranks, here).sum(0).tolist()
        # They arrive by rank and then by expert; sorting keeps the order of the ranks within an expert.
        expert = torch.arange(here, device="cpu").repeat(ranks).repeat_interleave(arriving)
        self._by_expert = _Order(expert.argsort(stable=True))
        self._by_rank = _Order(self._by_expert.order.argsort())

    def dispatch(self, rows: Tensor, quantizer: Quantizer | None = None) -> Tensor:
        """Send the rows of this rank to their experts, and return the rows that arrive for the experts of this rank.

        Args:
            rows: [M, K], sorted by expert, as many as ``counts`` says.
            quantizer: send the rows quantized, as rowwise planes of this quantizer.

        Returns:
            The rows that arrived, sorted by expert: a plain tensor, or with ``quantizer`` a quantized tensor that has
            only a rowwise plane.

        Raises:
            ValueError: ``rows`` has another shape, or rows of this quantizer's format cannot be sent separately.
            TypeError: ``rows`` is quantized already.
        """
        with telling_others("dispatched tokens"):
            self._check(rows, sum(self._sent), "dispatched")
            if quantizer is None:
                return all_to_all_rows(rows, self._sent, self._got, self.group)[self._by_expert.on(rows.device)]
            out: Tensor = _QuantizedDispatch.apply(rows, self, _row_quantizer(quantizer, self.group))
        return out

    def combine(self, rows: Tensor) -> Tensor:
        """Send the outputs of the experts back to the ranks that the tokens came from.

        Args:
            rows: the outputs, in the order of the rows that `dispatch` returned.

        Returns:
            The outputs for this rank's tokens, in the order that they were dispatched in.
        """
        with telling_others("combined tokens"):
            self._check(rows, sum(self._got), "combined")
            return all_to_all_rows(rows[self._by_rank.on(rows.device)], self._got, self._sent, self.group)

    def _check(self, rows: Tensor, count: int, done: str) -> None:
        if isinstance(rows, QuantizedTensor):
            raise TypeError(
                f"rows to be {done} must be a plain tensor, got a {type(rows).__name__}; dequantize it first"
            )
        if rows.dim() != 2 or rows.shape[0] != count:
            raise ValueError(
                f"expected a matrix of {count} rows to be {done}, got a tensor of shape {list(rows.shape)}"
            )

    def _send_planes(self, plane: Plane) -> Plane:
        arrived = _exchanged(bytes_of_rows(plane), self._sent, self._got, self.group)
        return plane_of_rows(arrived[self._by_expert.on(arrived.device)], plane)

    def _send_back(self, gradient: Tensor) -> Tensor:
        return _exchanged(gradient[self._by_rank.on(gradient.device)], self._got, self._sent, self.group)


class _Order:
    """An order of rows that the host knows. It is copied to a device once, without waiting for it."""

    def __init__(self, order: Tensor) -> None:
        self.order = order
        self._there: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The order as a tensor on a device."""
        if self._there is None or self._there.device != device:
            waits = device.type != "cuda"
            self._there = (self.order if waits else self.order.pin_memory()).to(device, non_blocking=not waits)
        return self._there


class _QuantizedDispatch(torch.autograd.Function):
    """Quantize rows and send their planes. The gradient of quantizing is the identity."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange, quantizer: Quantizer) -> Any:
        ctx.exchange, ctx.dtype, ctx.entrances = exchange, rows.dtype, entrances(rows)
        rows = rows.detach().to(activation_dtype(rows))
        plane = quantizer.storing(rowwise=True, columnwise=False).quantize(rows).plane(ROWWISE)
        own = quantizer.copy()
        own.internal = False
        own.set_usage(rowwise=True, columnwise=False)
        sent = exchange._send_planes(plane)
        return own._holding([sent], sent.shape, rows.dtype)

    @staticmethod
    @differentiable_once("tokens that are sent quantized")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if isinstance(gradient, QuantizedTensor):
            gradient = gradient.dequantize()
        return ctx.exchange._send_back(gradient).to(ctx.dtype), None, None


def _row_quantizer(quantizer: Quantizer, group: Any) -> Quantizer:
    """A quantizer for rows that are sent separately, with scales that are computed from the rows of all ranks."""
    reason = why_not_sent(quantizer)
    if reason is None and quantizer.with_amax_reduction and quantizer.amax_reduction_group is not group:
        reason = (
            "its amax is reduced over other ranks than the group that the tokens are sent in; use a format without an "
            "amax of the whole tensor"
        )
    if reason is not None:
        raise ValueError(
            f"tokens cannot be sent as rowwise planes of {type(quantizer).__name__}: {reason}. Or dispatch them "
            "without a quantizer"
        )
    row = quantizer_of_rows(quantizer)
    return row.reducing(group, axis=0) if group_size(group) > 1 else row
