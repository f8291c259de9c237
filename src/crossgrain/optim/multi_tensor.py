"""Operations on lists of tensors, called in the way the field calls them.

    norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag, [gradients], False)

Each takes a chunk size, which has no meaning here, a flag that is set where numbers are not finite, and lists of
tensors of which one or more are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls an operation with a chunk size."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = inp · scale`` for ``[inputs, outputs]``; the flag is set if an input is not finite."""
    inputs, outputs = tensor_lists
    for source, destination in zip(inputs, outputs, strict=True):
        _note_unless_finite(source, noop_flag)
        destination.copy_(source.to(torch.float32) * scale)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm [1] of all tensors together in float32, and of each, if asked."""
    return _norms(tensor_lists[0], noop_flag, per_tensor, 1.0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of ``tensors · inv_scale``."""
    return _norms(tensor_lists[0], noop_flag, per_tensor, float(inv_scale))


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
    """One step for ``[gradients, parameters, exp_avgs, exp_avg_sqs]``, in float32.

    ``mode`` 1 decays the weights themselves (AdamW), 0 adds the decay to the gradient.
    """
    if bool(noop_flag.any()):
        return
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for grad, param, exp_avg, exp_avg_sq in zip(*tensor_lists, strict=True):
        wide, g = param.to(torch.float32), grad.to(torch.float32)
        if mode == 0:
            g = g + weight_decay * wide
        m = beta1 * exp_avg.to(torch.float32) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.to(torch.float32) + (1 - beta2) * g * g
        update = (m / first) / ((v / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * wide
        param.copy_(wide - lr * update)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


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
    """One step for ``[gradients, parameters, momenta]``, and copies of the parameters if there is a fourth list."""
    if bool(noop_flag.any()):
        return
    copies: Sequence[Tensor | None] = tensor_lists[3] if len(tensor_lists) > 3 else [None] * len(tensor_lists[0])
    for grad, param, buffer, copy in zip(*tensor_lists[:3], copies, strict=True):
        wide, g = param.to(torch.float32), grad.to(torch.float32) * scale
        if not wd_after_momentum:
            g = g + weight_decay * wide
        if momentum:
            kept = g if first_run else momentum * buffer.to(torch.float32) + (1 - dampening) * g
            buffer.copy_(kept)
            g = g + momentum * kept if nesterov else kept
        if wd_after_momentum:
            g = g + weight_decay * wide
        param.copy_(wide - lr * g)
        if copy is not None:
            copy.copy_(param)


def _norms(tensors: Sequence[Tensor], noop_flag: Tensor, per_tensor: bool, factor: float) -> tuple[Tensor, Tensor]:
    device = noop_flag.device
    each = [torch.linalg.vector_norm(tensor, dtype=torch.float32) * factor for tensor in tensors]
    norms = torch.stack(each) if each else torch.zeros(0, device=device)
    total = torch.linalg.vector_norm(norms).reshape(1)
    _note_unless_finite(total, noop_flag)
    return total, norms if per_tensor else norms.new_zeros(0)


def _note_unless_finite(values: Tensor, flag: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        flag.fill_(1)
