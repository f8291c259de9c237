"""How the tensors of a state are sharded: like those of the object that it is loaded into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded, local_part


def layout_of(value: Any) -> Callable[[tuple[Any, ...]], Any]:
    """A function from the path of a tensor in a state to a tensor that shows the layout to load it in.

    Args:
        value: a module, an optimizer, or anything else, for which the function returns None. Paths begin with its name.
    """
    if isinstance(value, nn.Module):
        state = value.state_dict()
        return lambda path: state.get(path[1]) if len(path) == 2 else None
    if isinstance(value, torch.optim.Optimizer):
        params = dict(enumerate(param for group in value.param_groups for param in group["params"]))
        return lambda path: plain_layout(params.get(path[2])) if path[1] == "state" else None
    return lambda path: None


def plain_layout(param: Any) -> Any:
    """A plain tensor that is sharded like ``param``: optimizer states of quantized parameters are not quantized."""
    if param is None or not isinstance(local_part(param), QuantizedTensor):
        return param
    return torch.zeros_like(param)


def shards_stand_alone(model: nn.Module) -> None:
    """Let shards that were cut from a whole tensor have their own scales, which the checkpoint then replaces."""
    for param in model.parameters():
        if is_sharded(param) and isinstance(local_part(param), QuantizedTensor):
            local_part(param)._stand_alone()
