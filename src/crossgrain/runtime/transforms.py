"""Code that torch records or transforms: nothing can be quantized there, or only without numbers.

`torch.jit.trace` records operations of torch. Kernels of crossgrain are none: their results would become constants of
the recorded graph. The transforms of `torch.func` (vmap, grad, jvp, jacrev, ...) pass stand-ins for tensors.
Fake tensors have shapes and no numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch

get_tracing_state = torch._C._get_tracing_state  # None outside of `torch.jit.trace`
current_transform = _functorch.peek_interpreter_stack  # None outside of the transforms of `torch.func`


def new_tensors_are_fake() -> bool:
    """Whether new tensors have no memory, because of a dispatch mode. Without any mode, callers need not ask."""
    return type(torch.empty(0, device="cpu")) is not Tensor


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError inside `torch.jit.trace` and inside the transforms of `torch.func`.

    Args:
        what: what would quantize there, for the message.
    """
    if get_tracing_state() is not None:
        raise NotImplementedError(
            f"{what} cannot be recorded by torch.jit.trace, which would store quantized numbers as constants. Use "
            "torch.compile or torch.export, or export the weights (crossgrain.unconvert gives the plain model back)."
        )
    # `functionalize` changes nothing about numbers or gradients.
    top = current_transform()
    if top is not None and top.key() != _functorch.TransformType.Functionalize:
        raise NotImplementedError(
            f"{what} cannot run inside the transforms of torch.func (vmap, grad, vjp, jvp, jacrev, hessian): these do "
            "not see how quantized products are computed. Use torch.autograd and a loop or a batch dimension; "
            "torch.func.functional_call works. crossgrain.unconvert gives the plain model back."
        )
