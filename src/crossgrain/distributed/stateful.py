"""`ModelState` and `OptimizerState`: quantized weights for programs that call torch.distributed.checkpoint themselves.

    dcp.save({"model": ModelState(model), "optimizer": OptimizerState(optimizer)}, checkpoint_id=path)
    dcp.load({"model": ModelState(model), "optimizer": OptimizerState(optimizer)}, checkpoint_id=path)

A quantized tensor is saved as the buffers of its planes, which torch can cut differently for another number of ranks.
So the bytes are the same after loading. `checkpoint.save` does the same, and also keeps a manifest, the recipe and
random states.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from ..files.undo import all_or_nothing
from ..optim.base import MASTER
from ..runtime.logs import withheld
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from ..tensor.sharding import local_part
from .state_layout import layout_of, shards_stand_alone
from .state_tree import Tensors, put_together, taken_apart

_DESCRIPTION = "crossgrain"  # what each tensor is, as text, beside the tensors
_BEGUN = "has_begun"  # whether an optimizer had made a step, beside its state


class _State(Stateful):
    """The state of one object as plain tensors, which are copies: a load changes the object only if all of it fits."""

    def __init__(self, value: Any, kind: str) -> None:
        self._value, self._kind = value, kind

    def _present(self) -> Any:
        """The state to save, which also shows what to load."""
        return self._value.state_dict()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The tensors by name, and a description of them."""
        tensors: Tensors = {}
        plain = taken_apart(self._present(), (), tensors)
        copies: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {**copies, _DESCRIPTION: json.dumps(plain)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned, perhaps on other ranks.

        Raises:
            ValueError: it does not fit; the message names the tensors. Nothing has changed then.
        """
        if _DESCRIPTION not in state_dict:
            name = f"crossgrain.distributed.checkpoint.{type(self).__name__}"
            raise ValueError(f"this state of the {self._kind} was not saved by {name}")
        tensors: Tensors = {}
        problems: list[str] = []
        finish = put_together(json.loads(state_dict[_DESCRIPTION]), (), tensors, self._layout(), problems)
        problems += [f"{name} is missing" for name in tensors if name not in state_dict]
        if problems:
            raise ValueError(f"the checkpoint does not fit the {self._kind}: {'; '.join(problems)}")
        for name, tensor in tensors.items():
            tensor.copy_(state_dict[name])
        with all_or_nothing(self._value):
            self._load(finish())

    def _layout(self) -> Callable[[tuple[Any, ...]], Any]:
        layout = layout_of(self._value)
        return lambda path: layout((self._kind, *path))

    def _load(self, state: Any) -> None:
        self._value.load_state_dict(state)


class ModelState(_State):
    """The state of a model for torch.distributed.checkpoint.

    Args:
        model: the model. Its weights may be quantized, sharded, or both.
        strict: as in ``torch.nn.Module.load_state_dict``.
    """

    def __init__(self, model: nn.Module, *, strict: bool = True) -> None:
        super().__init__(model, "model")
        self._strict = strict

    def _load(self, state: Any) -> None:
        shards_stand_alone(self._value)
        self._value.load_state_dict(state, strict=self._strict)


class OptimizerState(_State):
    """The state of an optimizer for torch.distributed.checkpoint.

    An optimizer that has not made a step yet can be loaded: its states are made for all parameters that require
    gradients. So all of them must have had a gradient when the checkpoint was saved.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, "optimizer")

    def _present(self) -> Any:
        begun = bool(self._value.state)
        return {**(self._value if begun else _begun(self._value)).state_dict(), _BEGUN: begun}

    def _load(self, state: Any) -> None:
        if not state.pop(_BEGUN, True):  # the states are those of a step that was never made
            states = state["state"].items()
            state["state"] = {index: {MASTER: own[MASTER]} for index, own in states if MASTER in own}
        super()._load(state)


def _begun(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer, for the same parameters, which has made a step that changes nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    begun = copy.deepcopy(optimizer, {id(param): param for param in params})
    before = [(param, param.grad, _copied(param), preserved_value(param)) for param in params]
    try:
        for group in begun.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        with withheld():  # an update that changes nothing: this one is not meant to
            begun.step()
    finally:
        for param, grad, numbers, initial in before:
            param.grad = grad
            _restore(param, numbers)
            if initial is not None:
                keep_high_precision_init_val(local_part(param), initial)  # its step has dropped it
    for group, own in zip(begun.param_groups, optimizer.param_groups, strict=True):
        group["lr"] = own["lr"]
        for counted in group.keys() - own.keys():  # some count their steps here
            del group[counted]
    return begun


def _copied(param: Any) -> Any:
    return local_part(param.detach()).clone()


def _restore(param: Any, numbers: Any) -> None:
    """Write the bytes back: rounding the same numbers again may give others."""
    local = local_part(param.detach())
    if isinstance(local, QuantizedTensor):
        local.copy_from_storage(numbers)
    else:
        local.copy_(numbers)
