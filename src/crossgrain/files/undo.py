"""Restore modules and optimizers, so that a load takes effect completely or not at all, and a step can be repeated.

Torch loads a state dict tensor by tensor. When it finds one that does not fit, others have been written already. So
the present state is copied first, which needs memory for one more copy while the load runs. If the load fails, the
copy is written back into the same tensors, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..nn.state_dicts import Histories
from ..ops.op import FusedOperation
from ..quantizers.base import Quantizer
from ..quantizers.hybrid_tensor import HybridQuantizedTensorStorage
from ..recipe.extra_state import is_empty
from ..tensor import QuantizedTensorStorage
from .random_state import get_random_state, set_random_state

Restore = Callable[[], None]


@contextmanager
def all_or_nothing(*objects: Any) -> Iterator[None]:
    """Context manager: if the block raises, restore ``objects`` to what they were before it.

    The states of random number generators are restored too, because loading may round stochastically.

    Args:
        *objects: modules, optimizers, and anything else with ``state_dict`` and ``load_state_dict``.
    """
    restores = [remembered(value) for value in objects]
    restores.append(partial(set_random_state, get_random_state()))
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for restore in restores:
                restore()
        raise


def remembered(value: Any) -> Restore:
    """Copy the state of an object, and return a function that restores it. It can be called any number of times.

    Args:
        value: a module, an optimizer, or anything else with ``state_dict`` and ``load_state_dict``. Gradients are not
            part of a module's state; histories of delayed scaling are.
    """
    if isinstance(value, nn.Module):
        return _restore_module(value)
    if isinstance(value, Optimizer):
        return _restore_optimizer(value)
    before = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(copy.deepcopy(before))


def _restore_optimizer(optimizer: Optimizer) -> Restore:
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def copied(state: Any) -> Any:
        return copy.deepcopy(state, {id(param): param for param in params})

    before = copied(optimizer.__getstate__())
    return lambda: optimizer.__setstate__(copied(before))


def _restore_module(model: nn.Module) -> Restore:
    restores: list[Restore] = []
    contents: dict[int, Restore] = {}  # by tensor: one may be in many places
    for module in _all_modules(model):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            restores.append(_restore_slot(module, name, tensor))
            if tensor is not None and id(tensor) not in contents:
                contents[id(tensor)] = _restore_tensor(tensor)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            restores.append(_restore_extra_state(module))

    @torch.no_grad()
    def restore() -> None:
        for each in [*restores, *contents.values()]:
            each()

    return restore


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """All submodules, including those inside fused operations, which torch does not list."""
    modules = list(model.modules())
    fused = [module for module in modules if isinstance(module, FusedOperation)]
    return list(dict.fromkeys([*modules, *(op for module in fused for op in module.basic_ops)]))


def _restore_slot(module: nn.Module, name: str, tensor: Tensor | None) -> Restore:
    """Put the original tensor object back if ``assign=True`` has replaced it."""

    def restore() -> None:
        if getattr(module, name) is not tensor:
            setattr(module, name, tensor)

    return restore


def _restore_extra_state(module: nn.Module) -> Restore:
    before = copy.deepcopy(module.get_extra_state())

    def restore() -> None:
        module.set_extra_state(copy.deepcopy(before))
        if isinstance(module, Histories) and is_empty(before):
            module.reset_fp8_meta_tensors()  # there were no histories: those that there are now begin again

    return restore


def _restore_tensor(tensor: Any) -> Restore:
    if tensor.is_meta:
        return lambda: None
    parts = _parts(tensor)
    buffers: list[Tensor] = [tensor.detach()]
    if isinstance(tensor, QuantizedTensorStorage):
        buffers = [*(buffer for _, buffer in tensor._buffers()), *_quantizer_tensors(tensor._quantizer)]
    values = [buffer.clone() for buffer in buffers]
    records = [(part, part._epochs, dict(part._formats)) for part in parts]
    marks = [(mark, mark.number, mark.tensor.number, mark.init_value) for part in parts for mark in part._write_marks()]
    initial = {name: value for name, value in vars(tensor).items() if name.endswith("_high_precision_init_val")}

    def restore() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        for part, epochs, formats in records:
            part._epochs = epochs
            part._formats.update(formats)
        for mark, number, last, init_value in marks:
            mark.number, mark.tensor.number, mark.init_value = number, last, init_value
        vars(tensor).update(initial)

    return restore


def _parts(tensor: Any) -> list[QuantizedTensorStorage]:
    """The tensors that hold planes: the children of a hybrid, or a quantized tensor itself. Empty for plain tensors."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        return list(tensor._children().values())
    return [tensor] if isinstance(tensor, QuantizedTensorStorage) else []


def _quantizer_tensors(quantizer: Quantizer | None) -> list[Tensor]:
    """The tensors in a quantizer that change when it quantizes: scales and amaxes."""
    found = []
    for value in [] if quantizer is None else vars(quantizer).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Quantizer):
            found.extend(_quantizer_tensors(value))
    return found
