"""Split a state dict into named plain tensors, which torch saves in shards, and a description; and rebuild it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..files.description import dtype_from, plain_dtype, plain_format
from ..planes import Direction
from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded, local_part, sharded_like
from .plane_matrices import named_planes, plane_matrices

Path = tuple[Any, ...]
Tensors = dict[str, Tensor]
Finish = Callable[[], Any]


def taken_apart(value: Any, path: Path, tensors: Tensors) -> dict[str, Any]:
    """Return a description of ``value`` in plain data, and add all its tensors to ``tensors``, named by their path."""
    name = ".".join(map(str, path))
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device, so it has no values to save; initialize the model first")
        local = local_part(value.detach())
        if not isinstance(local, QuantizedTensor):
            _add(tensors, name, value.detach())
            return {"tensor": list(value.shape), "dtype": plain_dtype(value.dtype)}
        for part, matrix in plane_matrices(value.detach()):
            _add(tensors, f"{name}.{part}", matrix)
        return {"quantized": list(value.shape), "planes": _plain_planes(local)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"{name} has keys that are neither strings nor integers, so it cannot be saved")
        return {"mapping": [[key, taken_apart(own, (*path, key), tensors)] for key, own in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [taken_apart(own, (*path, at), tensors) for at, own in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{name} cannot be saved: a {type(value).__name__} is neither a tensor nor plain data")


def _add(tensors: Tensors, name: str, tensor: Tensor) -> None:
    if name in tensors:
        raise ValueError(f"two tensors would be called {name} in the checkpoint; rename one of them")
    tensors[name] = tensor


def _plain_planes(tensor: QuantizedTensor) -> Any:
    planes = {direction.value: plain_format(plane.format) for direction, plane in named_planes(tensor).items()}
    return json.loads(json.dumps(planes))  # as they come back


def put_together(
    plain: Mapping[str, Any], path: Path, tensors: Tensors, like: Callable[[Path], Any], problems: list[str]
) -> Finish:
    """Add the tensors to read to ``tensors``, empty, laid out like ``like(path)``.

    When they have been read, the returned function gives the value. What does not fit is added to ``problems``.
    """
    name = ".".join(map(str, path))
    if "value" in plain:
        return lambda: plain["value"]
    if "mapping" in plain:
        values = {key: put_together(own, (*path, key), tensors, like, problems) for key, own in plain["mapping"]}
        return lambda: {key: finish() for key, finish in values.items()}
    for kind in (list, tuple):
        if kind.__name__ in plain:
            members = enumerate(plain[kind.__name__])
            parts = [put_together(own, (*path, at), tensors, like, problems) for at, own in members]
            return lambda: kind(finish() for finish in parts)
    model = like(path)
    problem = _why_not(plain, model)
    if problem:
        problems.append(f"{name}: {problem}")
        return lambda: None
    if "quantized" in plain:
        return _quantized(model, name, tensors)
    shape = torch.Size(plain["tensor"])
    dtype = dtype_from(plain["dtype"])
    device = torch.device("cpu") if model is None else model.device
    if model is not None and is_sharded(model) and model.shape == shape:
        empty = sharded_like(torch.empty(local_part(model).shape, dtype=dtype, device=device), model)
    else:
        empty = torch.empty(shape, dtype=dtype, device=device)
    tensors[name] = empty
    return lambda: empty


def _quantized(model: Any, name: str, tensors: Tensors) -> Finish:
    local = local_part(model)._empty_like()
    whole = sharded_like(local, model)
    for part, matrix in plane_matrices(whole):
        tensors[f"{name}.{part}"] = matrix

    def finish() -> Any:
        local._derive_planes(tuple(Direction))
        local._mark_written()
        return whole

    return finish


def _why_not(plain: Mapping[str, Any], model: Any) -> str | None:
    """The reason why a tensor of the checkpoint cannot be loaded into ``model``; None if it can."""
    local = None if model is None else local_part(model)
    if "quantized" not in plain:
        if isinstance(local, QuantizedTensor):
            return f"the checkpoint holds {plain['dtype']}, the model {_formats(_plain_planes(local))}"
        return None
    held = _formats(plain["planes"])
    if model is None:
        return f"the checkpoint holds {held}, but the model has no such tensor"
    if not isinstance(local, QuantizedTensor):
        return f"the checkpoint holds {held}, the model {plain_dtype(model.dtype)}"
    if plain["planes"] != _plain_planes(local):
        return f"the checkpoint holds {held}, the model {_formats(_plain_planes(local))}"
    if list(model.shape) != plain["quantized"]:
        return f"the checkpoint has shape {plain['quantized']}, the model {list(model.shape)}"
    return None


def _formats(planes: Mapping[str, Any]) -> str:
    held = [direction.value for direction in Direction if direction.value in planes]
    return ", ".join(f"{name} {planes[name]['name']}" for name in held) or "no planes"
