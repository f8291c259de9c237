"""Master weights: float32 copies of low-precision parameters, which an optimizer updates.

An update is usually smaller than the distance between two numbers of a low-precision format, so adding it to the
parameter itself would have no effect after rounding. Added to a float32 master it accumulates. The parameter is written
from the master after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensor import QuantizedTensor
from ..tensor.init_values import clear_preserved_value, preserved_value
from ..tensor.sharding import local_part, write_shard


def take_master(param: Tensor) -> Tensor:
    """Return a new float32 master of ``param``.

    It is made from the preserved initial value, which is then dropped, or else from the decoded parameter. For a
    sharded parameter it is that of this rank's shard.
    """
    value = preserved_value(param) if is_quantized(param) else None
    if value is None:
        value = as_plain(param)
    master = value.to(device=param.device, dtype=torch.float32, copy=True).contiguous()
    if is_quantized(param):
        clear_preserved_value(param)  # not before there is a master
    return master


def is_quantized(param: Tensor) -> bool:
    """Whether ``param``, or this rank's shard of it, is quantized."""
    return isinstance(local_part(param), QuantizedTensor)


def check_in_use(groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a parameter is no longer part of its model: updating it would have no effect on the model."""
    for group in groups:
        for param in group["params"]:
            if getattr(param, "_shard", None) is not None:
                raise RuntimeError(
                    f"the optimizer holds a {type(param).__name__} of shape {list(param.shape)} that FSDP2 had "
                    "gathered when the optimizer was made, not the shard of this rank. Call reshard() on the model "
                    "before passing model.parameters() to an optimizer"
                )
            if getattr(param, "was_replaced", False):
                raise RuntimeError(
                    f"the optimizer holds a {type(param).__name__} of shape {list(param.shape)} that requantize_ has "
                    "replaced in its model. Call requantize_(model, recipe, optimizer), or make a new optimizer"
                )


def check_shapes(optimizer: Optimizer, state_dict: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise if a state of these names has another shape than its parameter, since copying might broadcast it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(saved, params, strict=False):  # torch says if these are not as many
        state = state_dict["state"].get(index, {})
        for name in names:
            if name not in state:
                continue
            shape, expected = local_part(torch.as_tensor(state[name])).shape, local_part(param).shape
            if shape != expected:
                raise ValueError(
                    f"{type(optimizer).__name__}: the state {name} of parameter {index} has shape {list(shape)}, but "
                    f"the parameter has {list(expected)}; the state dict belongs to another model"
                )


def as_plain(param: Tensor) -> Tensor:
    """The values of ``param``, or of this rank's shard; decoded to float32 if it is quantized."""
    param = local_part(param).detach()
    return param.dequantize(dtype=torch.float32) if isinstance(param, QuantizedTensor) else param


def write_params(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write ``values`` to ``params`` in place; of quantized parameters, all planes."""
    plain = []
    for param, value in zip(params, values, strict=True):
        own, value = local_part(param), local_part(value)
        if isinstance(own, QuantizedTensor):
            write_shard(param, value)
        else:
            plain.append((own, value))
    if plain:
        torch._foreach_copy_([param for param, _ in plain], [value for _, value in plain])


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 master into the nearest bfloat16 and an int16 remainder; `join_master` is the inverse."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master: the bits of the bfloat16 as upper half, plus the signed remainder."""
    upper = rounded.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + remainder).view(torch.float32)
