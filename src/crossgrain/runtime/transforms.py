"""Code that torch records or transforms: nothing can be quantized there, or only without numbers.

`torch.jit.trace` records operations of torch. Kernels of crossgrain are none: their results would become constants of
the recorded graph. The transforms of `torch.func` (vmap, grad, jvp, jacrev, ...) pass stand-ins for tensors.
Fake tensors have shapes and no numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

get_tracing_state = torch._C._get_tracing_state  # None outside of `torch.jit.trace`
current_transform = _functorch.peek_interpreter_stack  # None outside of the transforms of `torch.func`
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many there are; asked first where a call would cost too much


def new_tensors_are_fake() -> bool:
    """Whether new tensors have no memory, because of a dispatch mode."""
    return bool(dispatch_modes()) and type(torch.empty(0, device="cpu")) is not Tensor


def memory_is_out_of_reach() -> bool:
    """Whether only operations of torch may read or write memory: tensors are fake, or operations are recorded."""
    return bool(dispatch_modes()) and (new_tensors_are_fake() or get_proxy_mode() is not None)


def as_lasting_as(tensor: Tensor | None) -> AbstractContextManager[object]:
    """A context manager for new tensors that are kept beside ``tensor``: they are not fake unless it is.

    With None, they are what the modes make of them.
    """
    if tensor is not None and not isinstance(tensor, FakeTensor) and new_tensors_are_fake():
        found: AbstractContextManager[object] = _disable_current_modes()
        return found
    return nullcontext()


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError inside `torch.jit.trace`, `make_fx` and the transforms of `torch.func`.

    `make_fx` may record fake tensors: of these, nothing is measured.

    Args:
        what: what would quantize there, for the message.
    """
    if get_tracing_state() is not None:
        raise NotImplementedError(
            f"{what} cannot be recorded by torch.jit.trace, which would store quantized numbers as constants. Use "
            "torch.compile or torch.export, or export the weights (crossgrain.unconvert gives the plain model back)."
        )
    if memory_is_out_of_reach() and not new_tensors_are_fake():
        raise NotImplementedError(
            f"{what} cannot be recorded by make_fx with numbers, which would store what follows from them as "
            "constants. Use torch.compile or torch.export, or tracing_mode='fake'."
        )
    # `functionalize` changes nothing about numbers or gradients.
    top = current_transform()
    if top is not None and top.key() != _functorch.TransformType.Functionalize:
        raise NotImplementedError(
            f"{what} cannot run inside the transforms of torch.func (vmap, grad, vjp, jvp, jacrev, hessian): these do "
            "not see how quantized products are computed. Use torch.autograd and a loop or a batch dimension; "
            "torch.func.functional_call works. crossgrain.unconvert gives the plain model back."
        )
