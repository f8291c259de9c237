"""One linear layer per group of rows, for modules and fusible operations. It uses the GEMMs of `linear.function`.

If possible, operands of all groups are quantized in one call (see `split_quantize`). The weights may be parts of one
parameter. Sums over ranks are computed once for all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..quantizers.nonfinite import naming_places_in
from ..runtime.derivatives import differentiable_once, entrances
from ..runtime.host_and_device import on_device
from ..tensor import QuantizedTensor
from . import split_quantize  # the function is looked up when it is called, so that it can be replaced
from .call import LinearCall, Needs, check_dtypes, check_input, check_takes_gradient
from .function import LinearFunction
from .grouped_input import given_groups, hollow_rows, takes_rows
from .padding import Sizes
from .parallel import TensorParallel
from .saved_planes import BUFFERS_PER_OPERAND
from .split_quantize import padded_groups
from .weight_gradient import check_has_main_grad, dummy_weight_gradient


@dataclass
class Groups:
    """One call of a grouped layer: everything except its input. Lists have one entry per group.

    Attributes:
        sizes: number of rows of each group.
        weights: the weights; parts of ``packed_weight`` if there is one.
        biases: the biases, or None; parts of ``packed_bias`` if there is one.
        calls: quantizers and options of each group. Their ``parallel`` is None.
        packed_weight: one parameter for all weights [groups, N, K], if there is one.
        packed_bias: one parameter for all biases [groups, N], if there is one.
        members: the groups of the packed parameters that are here, if groups without rows are left out; None for all.
        out: memory of the caller for y, if given.
        dgrad_out: memory of the caller for dx, if given.
        parallel: how ranks share all groups; None if they do not.
    """

    sizes: list[int]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | Sequence[None]
    calls: list[LinearCall] = field(default_factory=list)
    packed_weight: Tensor | None = None
    packed_bias: Tensor | None = None
    members: list[int] | None = None
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    parallel: TensorParallel | None = None

    @property
    def sums_output(self) -> bool:
        """Whether y is summed over ranks. Biases are then added to the sum."""
        return self.parallel is not None and self.parallel.sums_output

    def weight_parameters(self) -> list[Tensor]:
        """The parameters of the weights."""
        return list(self.weights) if self.packed_weight is None else [self.packed_weight]

    def bias_parameters(self) -> list[Tensor | None]:
        """The parameters of the biases."""
        return list(self.biases) if self.packed_bias is None else [self.packed_bias]

    def needs(self, x: Tensor) -> list[Needs]:
        """Which gradients are wanted for each group. Of a packed parameter, the parameter says it, not its parts."""
        count = len(self.sizes)
        dw = [parameter.requires_grad for parameter in self.weight_parameters()]
        db = [parameter is not None and parameter.requires_grad for parameter in self.bias_parameters()]
        if not torch.is_grad_enabled():
            return [Needs(False, False, False)] * count
        dws, dbs = (found * count if len(found) == 1 else found for found in (dw, db))
        return [Needs(x.requires_grad, w, b) for w, b in zip(dws, dbs, strict=True)]


def grouped_linear(x: Tensor, groups: Groups) -> Tensor:
    """Compute y [..., N] for x [..., K], whose rows are sorted by group."""
    call = groups.calls[0]
    check_input(x, groups.weights[0], call.layer)
    check_dtypes(groups.weights[0], call)
    needs = groups.needs(x)
    if not any(any(need) for need in needs):
        return grouped_forward(x, groups, needs)[0]
    if call.accumulate_main_grad or call.wgrad_queue is not None:
        for parameter in groups.weight_parameters():
            check_takes_gradient(parameter, call.layer)
    parameters = (*groups.weight_parameters(), *groups.bias_parameters())
    result: Tensor = _GroupedFunction.apply(x, groups, needs, *parameters)
    return result


class GroupContext:
    """The ``ctx`` of `LinearFunction` for one group."""

    call: LinearCall
    needs: Needs
    padded: Sizes
    weight: Any
    bias_dtype: torch.dtype | None

    def __init__(self) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward."""
        self.saved_tensors = tensors


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, needs: list[Needs], *parameters: Tensor | None) -> Tensor:
        y, ctx.contexts, saved = grouped_forward(x, groups, needs)
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.shape = groups, x.shape
        ctx.entrances = entrances(x, *parameters)
        return y

    @staticmethod
    @differentiable_once(lambda ctx: ctx.groups.calls[0].layer)
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, weights, biases = grouped_backward(dy, ctx.groups, ctx.contexts, ctx.saved_tensors)
        return None if dx is None else dx.reshape(ctx.shape), None, None, *weights, *biases


def grouped_forward(
    x: Tensor, groups: Groups, needs: list[Needs]
) -> tuple[Tensor, list[GroupContext], list[Tensor | None]]:
    """Compute y; also return the contexts of the groups and the tensors to save, for `grouped_backward`."""
    if isinstance(x, QuantizedTensor) and not takes_rows(x, groups.calls[0], wgrad=any(need.dw for need in needs)):
        x = x.dequantize()
    rows = hollow_rows(x) if isinstance(x, QuantizedTensor) else x.detach().reshape(-1, x.shape[-1])
    if any(need.dx or need.dw for need in needs):  # all groups have the same padding, also one that is frozen
        for call in groups.calls:
            call.padding = call.padding._replace(m_forward=call.padding.m_backward)
    _quantize_inputs(x, groups, needs)
    outputs, contexts = [], []
    parts = zip(rows.split(groups.sizes), groups.weights, groups.biases, groups.calls, needs, strict=True)
    for group_rows, weight, bias, call, need in parts:
        context = GroupContext()
        added = None if groups.sums_output else bias
        outputs.append(LinearFunction.forward(context, group_rows, weight, added, call, need))
        context.bias_dtype = None if bias is None else bias.dtype
        contexts.append(context)
    saved = [tensor for context in contexts for tensor in context.saved_tensors]
    for context in contexts:
        context.saved_tensors = ()
    y = torch.cat(outputs)
    if groups.sums_output:
        y = _summed_output(y, groups)
    y = y.reshape(*x.shape[:-1], groups.weights[0].shape[0])
    return in_memory(y, groups.out, "out", groups.calls[0].layer), contexts, saved


def grouped_backward(
    dy: Tensor, groups: Groups, contexts: list[GroupContext], saved: Sequence[Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Compute dx [M, K] and the gradients of the weight and bias parameters. Those that are not wanted are None."""
    if isinstance(dy, QuantizedTensor):
        dy = dy.dequantize()
    dy = dy.reshape(sum(groups.sizes), groups.weights[0].shape[0]).to(groups.calls[0].dtype)
    _give_parts_main_grads(contexts, groups)
    _quantize_gradients(dy, contexts, groups)
    count = 2 * BUFFERS_PER_OPERAND
    dxs, dws, dbs = [], [], []
    for g, (context, rows) in enumerate(zip(contexts, dy.split(groups.sizes), strict=True)):
        context.saved_tensors = tuple(saved[g * count : (g + 1) * count])
        dx, dw, db, *_ = LinearFunction.backward(context, rows)
        context.saved_tensors, context.call.quantized_gradient = (), None
        dxs.append(dx)
        dws.append(dw)
        dbs.append(db)
    _collect_put_off(contexts, groups)
    dx = None
    if contexts[0].needs.dx:
        dx = in_memory(_whole_input_gradient(dxs, groups), groups.dgrad_out, "dgrad_out", groups.calls[0].layer)
    by_weight = _by_parameter(dws, groups.packed_weight, groups.members)
    return dx, by_weight, _by_parameter(dbs, groups.packed_bias, groups.members)


def _summed_output(y: Tensor, groups: Groups) -> Tensor:
    call = groups.calls[0]
    assert groups.parallel is not None
    y = groups.parallel.sum(y, call.layer)
    if groups.biases[0] is None:
        return y
    parts = zip(y.split(groups.sizes), groups.biases, strict=True)
    return torch.cat([rows + bias.detach() for rows, bias in parts if bias is not None]).to(call.dtype)


def _whole_input_gradient(parts: Sequence[Tensor], groups: Groups) -> Tensor:
    dx, call = torch.cat(list(parts)), groups.calls[0]
    if groups.parallel is None or not groups.parallel.sums_input_gradient:
        return dx
    return groups.parallel.sum(dx.to(call.dtype), call.layer).to(dx.dtype)


def in_memory(values: Tensor, memory: Tensor | None, name: str, layer: str) -> Tensor:
    """``values``, written to the memory of the caller if it gave some.

    Raises:
        ValueError: the memory is not of the shape and dtype of the values.
    """
    if memory is None:
        return values
    fits = memory.numel() == values.numel() and memory.shape[-1:] == values.shape[-1:]
    if not fits or memory.dtype != values.dtype:
        raise ValueError(
            f"{layer}: {name} must have the shape {list(values.shape)} and the dtype {values.dtype}, got "
            f"{list(memory.shape)} and {memory.dtype}"
        )
    return memory.detach().copy_(values.reshape(memory.shape))


# ---- operands ----------------------------------------------------------------------------------------


def _padded_sizes(groups: Groups, needs: Sequence[Needs]) -> list[Sizes]:
    n, k = groups.weights[0].shape
    return [
        call.padding.padded(Sizes(m, k, n), backward=need.dx or need.dw)
        for m, call, need in zip(groups.sizes, groups.calls, needs, strict=True)
    ]


def _quantize_inputs(x: Tensor, groups: Groups, needs: list[Needs]) -> None:
    call = groups.calls[0]
    if call.input is None:
        return
    padded = _padded_sizes(groups, needs)
    columnwise = any(need.dw for need in needs) and not call.keep_input and call.quantizes_backward
    if isinstance(x, QuantizedTensor):
        quantized = given_groups(x, groups.sizes, padded, groups.calls, columnwise=columnwise)
    else:
        rows, heights = x.detach().reshape(-1, x.shape[-1]).to(call.dtype), [size.m for size in padded]
        quantizers = [call.input for call in groups.calls if call.input is not None]
        with naming_places_in(rows):
            quantized = split_quantize.split_quantize(
                padded_groups(rows, groups.sizes, heights, padded[0].k),
                heights,
                split_quantize.Storing(quantizers, rowwise=True, columnwise=columnwise),
            )
    for call, group in zip(groups.calls, quantized, strict=True):
        call.quantized_input = group


def _quantize_gradients(dy: Tensor, contexts: list[GroupContext], groups: Groups) -> None:
    """Quantize dy, which has the dtype of activations, so that all formats get the same numbers."""
    call, needs = groups.calls[0], [context.needs for context in contexts]
    rowwise, columnwise = any(need.dx for need in needs), any(need.dw for need in needs)
    for context in contexts:
        check_has_main_grad(context)
    if call.grad_output is None or not call.quantizes_backward or not (rowwise or columnwise):
        return
    if call.on_backward is not None:
        call.on_backward()
    heights = [context.padded.m for context in contexts]
    quantizers = [call.grad_output for call in groups.calls if call.grad_output is not None]
    with naming_places_in(dy):
        quantized = split_quantize.split_quantize(
            padded_groups(dy, groups.sizes, heights, contexts[0].padded.n),
            heights,
            split_quantize.Storing(quantizers, rowwise=rowwise, columnwise=columnwise),
        )
    for call, group in zip(groups.calls, quantized, strict=True):
        call.quantized_gradient = group


# ---- gradients of parameters ---------------------------------------------------------------------------


def _by_parameter(
    gradients: list[Tensor | None], packed: Tensor | None, members: list[int] | None
) -> list[Tensor | None]:
    """The gradients by parameter: those of a packed parameter are stacked, with zeros for groups that are not here."""
    if packed is None:
        return gradients
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(gradients):
        return [None]
    if hasattr(packed, "grad_added_to_main_grad"):
        return [dummy_weight_gradient(packed)]
    stacked = torch.stack(present)
    if members is None or len(members) == len(packed):
        return [stacked]
    whole = stacked.new_zeros(packed.shape)
    whole[on_device(members, whole.device)] = stacked
    return [whole]


def _give_parts_main_grads(contexts: list[GroupContext], groups: Groups) -> None:
    """Give the parts of a packed weight the parts of its main_grad, to which their gradients are added."""
    packed: Any = groups.packed_weight
    main_grad = getattr(packed, "main_grad", None)
    if main_grad is None or not groups.calls[0].accumulate_main_grad:
        return
    for g, context in enumerate(contexts):
        if not context.needs.dw:
            continue
        context.weight.main_grad = main_grad[g]
        context.weight.overwrite_main_grad = getattr(packed, "overwrite_main_grad", False)
        if hasattr(packed, "grad_added_to_main_grad"):
            context.weight.grad_added_to_main_grad = packed.grad_added_to_main_grad = True


def _collect_put_off(contexts: list[GroupContext], groups: Groups) -> None:
    """Combine delayed gradients of a packed weight after that of the last group."""
    call, packed = groups.calls[0], groups.packed_weight
    if call.wgrad_queue is None or packed is None or call.accumulate_main_grad or not contexts[0].needs.dw:
        return
    parts = [context.weight for context in contexts]

    def later() -> None:
        dw = torch.stack([part.grad for part in parts])
        for part in parts:
            part.grad = None
        if packed.grad is None:
            packed.grad = dw
        else:
            packed.grad.add_(dw)

    call.wgrad_queue.append(later)
