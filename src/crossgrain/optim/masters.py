"""Master weights: the float32 values that parameters of lower precision are rounded from.

An update is usually smaller than the distance between neighbours in a low-precision format. Added to the
parameter itself it would round away; added to a float32 master it accumulates, and the parameter is
written from the master after each step.
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
    """A float32 copy of what ``param`` stands for: the preserved initial value, which is let go, or its numbers.

    Of a sharded parameter: of what this rank has.
    """
    value: Tensor | None = None
    if is_quantized(param):
        value = preserved_value(param)
        clear_preserved_value(param)
    if value is None:
        value = as_plain(param)
    return value.to(device=param.device, dtype=torch.float32, copy=True).contiguous()


def is_quantized(param: Tensor) -> bool:
    """Whether ``param``, or what this rank has of it, is quantized."""
    return isinstance(local_part(param), QuantizedTensor)


def check_in_use(groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a parameter is not the one that its model keeps: training would silently go nowhere."""
    for group in groups:
        for param in group["params"]:
            if getattr(param, "_shard", None) is not None:
                raise RuntimeError(
                    f"the optimizer holds a {type(param).__name__} {list(param.shape)} that FSDP2 had gathered when "
                    "the optimizer was made, not the shard that this rank keeps; call reshard() on the model before "
                    "model.parameters()"
                )
            if getattr(param, "was_replaced", False):
                raise RuntimeError(
                    f"the optimizer holds a {type(param).__name__} {list(param.shape)} that requantize_ has replaced "
                    "in its model; call requantize_(model, recipe, optimizer), or make a new optimizer"
                )


def check_shapes(optimizer: Optimizer, state_dict: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise if a state of these names is of another shape than its parameter: a copy might spread it out silently."""
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
                    f"{type(optimizer).__name__}: {name} of parameter {index} is {list(shape)}, and the parameter is "
                    f"{list(expected)}; this is the state of another model"
                )


def as_plain(param: Tensor) -> Tensor:
    """The numbers of ``param``, or of what this rank has of it; in float32 if it is quantized."""
    param = local_part(param).detach()
    return param.dequantize(dtype=torch.float32) if isinstance(param, QuantizedTensor) else param


def write_params(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Round ``values`` to ``params``: every plane that a quantized one holds, in place."""
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
    """A float32 master as its nearest bfloat16 and an int16 remainder, from which `join_master` restores it."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master: the bits of the bfloat16 above, plus the signed remainder."""
    upper = rounded.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + remainder).view(torch.float32)
