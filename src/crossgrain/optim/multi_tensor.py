"""Operations on lists of tensors, with the calling convention of Transformer Engine and Apex:

    norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag, [gradients], False)

Each takes a chunk size, which is ignored, a flag that is set to 1 if numbers are not finite, and lists of tensors. The
docstring of each function says which lists it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor import QuantizedTensor

TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls an operation with its chunk size."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write ``input · scale`` to each output, for ``[inputs, outputs]``. The flag is set if an input is not finite."""
    inputs, outputs = _checked("multi_tensor_scale", tensor_lists, 2)
    for source, destination in zip(inputs, outputs, strict=True):
        _note_unless_finite(source, noop_flag)
        destination.copy_(source.to(torch.float32) * scale)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm [1] of all tensors together in float32, and with ``per_tensor`` the norm of each."""
    return _norms(tensor_lists[0], noop_flag, per_tensor, 1.0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Like `multi_tensor_l2norm`, for ``tensors · inv_scale``."""
    return _norms(tensor_lists[0], noop_flag, per_tensor, inv_scale.to(torch.float32).view(()))


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Do one step of Adam in float32 for ``[gradients, parameters, exp_avgs, exp_avg_sqs]``.

    Nothing changes if the flag is set. A fifth list has master weights: these are updated, and the parameters become
    copies of them. ``mode`` 1 decays the weights themselves (AdamW); ``mode`` 0 adds the decay to the gradient.
    """
    _checked("multi_tensor_adam", tensor_lists, 4, 5)
    keep = _kept_if_set(noop_flag)
    masters = tensor_lists[4] if len(tensor_lists) > 4 else tensor_lists[1]
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for grad, param, exp_avg, exp_avg_sq, master in zip(*tensor_lists[:4], masters, strict=True):
        wide, g = master.to(torch.float32), grad.to(torch.float32)
        if mode == 0:
            g = g + weight_decay * wide
        m = beta1 * exp_avg.to(torch.float32) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.to(torch.float32) + (1 - beta2) * g * g
        update = (m / first) / ((v / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * wide
        keep(master, wide - lr * update)
        if param is not master:
            keep(param, master)
        keep(exp_avg, m)
        keep(exp_avg_sq, v)


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Do one step of SGD for ``[gradients, parameters, momenta]``. Nothing changes if the flag is set.

    A fourth list gets copies of the parameters.
    """
    _checked("multi_tensor_sgd", tensor_lists, 3, 4)
    keep = _kept_if_set(noop_flag)
    copies: Sequence[Tensor | None] = tensor_lists[3] if len(tensor_lists) > 3 else [None] * len(tensor_lists[0])
    for grad, param, buffer, copy in zip(*tensor_lists[:3], copies, strict=True):
        wide, g = param.to(torch.float32), grad.to(torch.float32) * scale
        if not wd_after_momentum:
            g = g + weight_decay * wide
        if momentum:
            kept = g if first_run else momentum * buffer.to(torch.float32) + (1 - dampening) * g
            keep(buffer, kept)
            g = g + momentum * kept if nesterov else kept
        if wd_after_momentum:
            g = g + weight_decay * wide
        keep(param, wide - lr * g)
        if copy is not None:
            keep(copy, param)


def _checked(name: str, lists: TensorLists, *counts: int) -> TensorLists:
    """Raise unless there are as many lists as allowed, with tensors of the same shapes."""
    if len(lists) not in counts:
        raise ValueError(f"{name} takes {' or '.join(map(str, counts))} lists of tensors, got {len(lists)}")
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in lists]
    if any(own != shapes[0] for own in shapes):
        raise ValueError(f"{name}: the tensors of the lists differ in number or shape: {shapes}")
    return lists


def _norms(
    tensors: Sequence[Tensor], noop_flag: Tensor, per_tensor: bool, factor: float | Tensor
) -> tuple[Tensor, Tensor]:
    device = noop_flag.device
    each = [torch.linalg.vector_norm(tensor, dtype=torch.float32) * factor for tensor in tensors]
    norms = torch.stack(each) if each else torch.zeros(0, device=device)
    total = torch.linalg.vector_norm(norms).reshape(1)
    _note_unless_finite(total, noop_flag)
    return total, norms if per_tensor else norms.new_zeros(0)


def _note_unless_finite(values: Tensor, flag: Tensor) -> None:
    flag.masked_fill_(~torch.isfinite(values).all().to(flag.device), 1)


def _kept_if_set(flag: Tensor) -> Callable[[Tensor, Tensor], None]:
    """A function that writes a new value into a tensor, unless the flag is set. The flag is not read by the host."""
    skip = flag.any()

    def keep(old: Tensor, new: Tensor) -> None:
        if isinstance(old, QuantizedTensor):
            old.quantize_(new, noop_flag=skip.to(torch.float32))
        else:
            old.copy_(torch.where(skip, old, new.to(old.dtype)))

    return keep
