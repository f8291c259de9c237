"""Convert a state dict to plain named tensors plus a description in JSON data, and back, without changing a byte.

A quantized tensor ``layer.weight`` becomes the buffers of its planes:

    layer.weight.rowwise.data   layer.weight.rowwise.scale   layer.weight.rowwise.amax
    layer.weight.columnwise.data   ...

Its class, shape, formats and quantizer go into the description. For a hybrid tensor, the rowwise buffers come from its
rowwise child and the columnwise buffers from its columnwise child. A dict inside the state dict (an extra state of
another library, or of an earlier version) is split: its tensors become ``layer._extra_state.<name>``, its numbers go
into the description. All other tensors, extra states of crossgrain among them, keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..formats import Format
from ..planes import Direction, Plane, empty_plane
from ..quantizers.any_format import FormatTensor
from ..quantizers.float8 import Float8Tensor
from ..quantizers.float8_block import Float8BlockwiseQTensor
from ..quantizers.hybrid_tensor import HybridQuantizedTensor
from ..quantizers.identity import IdentityTensor
from ..quantizers.mxfp8 import MXFP8Tensor
from ..quantizers.nvfp4 import NVFP4Tensor
from ..tensor import QuantizedTensor
from .description import dtype_from, format_from, plain_dtype, plain_format, plain_quantizer, quantizer_from

VERSION = 1

_CLASSES: dict[str, type[QuantizedTensor]] = {
    cls.__name__: cls
    for cls in (FormatTensor, Float8Tensor, Float8BlockwiseQTensor, IdentityTensor, MXFP8Tensor, NVFP4Tensor)
}
_HYBRID = HybridQuantizedTensor.__name__
_RESERVED = "__metadata__"
_PARTS = ("data", "scale", "amax")


@dataclass
class Flat:
    """A flattened state dict: plain tensors by name, and the description of what they are."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    formats: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def description(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "buffers"}

    def add_buffer(self, name: str, buffer: Tensor) -> None:
        if name in self.buffers:
            raise ValueError(
                f"two tensors would be called {name} in the file: a buffer of a quantized tensor and another entry of "
                "the state dict. Rename one of them"
            )
        if name == _RESERVED:
            raise ValueError(
                f"a tensor called {name} could not be read again: the safetensors format uses that name itself. Rename "
                "it"
            )
        self.buffers[name] = buffer.detach().to("cpu", copy=True).contiguous()

    def format_name(self, fmt: Format) -> str:
        if self.formats.setdefault(fmt.name, plain_format(fmt)) != plain_format(fmt):
            raise ValueError(
                f"the state dict has tensors of two different formats that are both named {fmt.name!r}; a file needs "
                "distinct names"
            )
        return fmt.name


# ---- to a file -------------------------------------------------------------------------------------------


def flatten(state_dict: Mapping[str, Any]) -> Flat:
    """Flatten a state dict. A tensor that occurs under two names is stored once, and the second name as an alias."""
    flat = Flat()
    known: dict[Any, str] = {}
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ValueError(
                    f"{key} is on the meta device, so it has no values to save; initialize the model first"
                )
            first = known.setdefault(_memory(value), key)
            if first != key:
                flat.aliases[key] = first
            elif isinstance(value, QuantizedTensor):
                flat.tensors[key] = _described(flat, key, value)
            else:
                flat.add_buffer(key, value)
        elif isinstance(value, Mapping):
            _flatten_mapping(flat, key, value)
        else:
            raise TypeError(
                f"{key} is a {type(value).__name__}, which cannot be saved; a file holds tensors, and dicts of "
                "tensors, numbers and strings"
            )
    return flat


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for non-empty tensors that occupy the same memory in the same way."""
    buffers = [buffer for _, buffer in tensor._buffers()] if isinstance(tensor, QuantizedTensor) else [tensor]
    places = [
        (buffer.data_ptr(), buffer.dtype, tuple(buffer.shape), buffer.stride(), buffer.is_neg(), buffer.is_conj())
        for buffer in buffers
    ]
    return (type(tensor), tuple(tensor.shape), *places) if tensor.numel() else (id(tensor),)


def _flatten_mapping(flat: Flat, key: str, mapping: Mapping[str, Any]) -> None:
    numbers = {}
    for name, value in mapping.items():
        if isinstance(value, Tensor) and not isinstance(value, QuantizedTensor):
            flat.add_buffer(f"{key}.{name}", value)
        elif value is None or isinstance(value, bool | int | float | str):
            numbers[name] = value
        else:
            raise TypeError(
                f"{key}.{name} is a {type(value).__name__}, which cannot be saved; an extra state may hold tensors, "
                "numbers and strings"
            )
    tensors = [name for name, value in mapping.items() if isinstance(value, Tensor)]
    flat.values[key] = {"numbers": numbers, "tensors": tensors}


def _described(flat: Flat, key: str, tensor: QuantizedTensor, serves: Direction | None = None) -> dict[str, Any]:
    tensor._check_fresh()
    if tensor._cut_axes:
        tensor = tensor._clone()  # a slice on its own, with the padding of its scales
    common = {
        "class": type(tensor).__name__,
        "shape": list(tensor.shape),
        "dtype": plain_dtype(tensor.dtype),
        "quantizer": plain_quantizer(tensor._quantizer),
    }
    if isinstance(tensor, HybridQuantizedTensor):
        children: dict[Direction, Any] = dict(tensor._children())
        return {**common, "children": {d.value: _described(flat, key, child, d) for d, child in children.items()}}
    if type(tensor) is not _CLASSES.get(type(tensor).__name__):
        raise TypeError(
            f"{key} is a {type(tensor).__name__}, which is not one of crossgrain's tensor classes: cannot save it"
        )
    planes = {}
    for plane in tensor.planes():
        name = (plane.direction if serves is None else serves).value
        if name in planes:
            raise ValueError(
                f"{key}: the {name} child of a hybrid tensor has planes in both directions; it must have only one"
            )
        planes[name] = {"direction": plane.direction.value, "transposed": plane.transposed}
        for part in _PARTS:
            buffer = getattr(plane, part)
            if buffer is not None:
                flat.add_buffer(f"{key}.{name}.{part}", buffer)
    return {
        **common,
        "layout": list(tensor._plane_tensor_shape()),
        "formats": {direction.value: flat.format_name(fmt) for direction, fmt in tensor._formats.items()},
        "planes": planes,
    }


# ---- from a file -----------------------------------------------------------------------------------------


def unflatten(buffers: Mapping[str, Tensor], description: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the state dict from what `flatten` made.

    Raises:
        KeyError, TypeError, ValueError: buffers and description do not fit together.
    """
    rest = dict(buffers)
    formats = {name: format_from(plain) for name, plain in description["formats"].items()}
    state: dict[str, Any] = {}
    for key, plain in description["tensors"].items():
        state[key] = _restored(rest, key, plain, formats)
    for key, plain in description["values"].items():
        state[key] = {**plain["numbers"], **{name: rest.pop(f"{key}.{name}") for name in plain["tensors"]}}
    for key, buffer in rest.items():
        if key in state:
            raise ValueError(f"the file has two entries for {key}")
        state[key] = buffer
    for key, first in description["aliases"].items():
        if key in state:
            raise ValueError(f"the file has two entries for {key}")
        state[key] = state[first]
    return state


def _restored(rest: dict[str, Tensor], key: str, plain: Mapping[str, Any], formats: Mapping[str, Format]) -> Any:
    shape, dtype = torch.Size(plain["shape"]), dtype_from(plain["dtype"])
    quantizer = quantizer_from(plain["quantizer"])
    if plain["class"] == _HYBRID:
        children = {d: _restored(rest, key, child, formats) for d, child in plain["children"].items()}
        storages = {f"{direction.value}_storage": children.pop(direction.value, None) for direction in Direction}
        if children:
            raise ValueError(
                f"{key} is a hybrid with unknown children {', '.join(children)}; expected rowwise and columnwise only"
            )
        return HybridQuantizedTensor(shape, dtype, quantizer=quantizer, **storages)
    cls = _CLASSES[plain["class"]]
    layout = torch.Size(plain["layout"])
    planes = list(_planes(rest, key, plain, formats, layout))
    tensor = cls._wrapper(layout, dtype, planes[0].data.device if planes else torch.device("cpu"))
    by_direction = {Direction(name): formats[fmt] for name, fmt in plain["formats"].items()}
    tensor._init_common(by_direction, quantizer, dtype, layout, [None] * len(cls._buffer_names))
    for plane in planes:
        tensor._set_plane(plane.direction, plane)
    return tensor if layout == shape else tensor._viewed(shape)


def _planes(
    rest: dict[str, Tensor], key: str, plain: Mapping[str, Any], formats: Mapping[str, Format], layout: torch.Size
) -> Iterator[Plane]:
    """Make the planes of a tensor from their buffers; check that each has the dtype and shape its format needs."""
    for name, about in plain["planes"].items():
        direction, transposed = Direction(about["direction"]), bool(about["transposed"])
        fmt = formats[plain["formats"][direction.value]]
        data = rest.pop(f"{key}.{name}.data")
        needed = empty_plane(
            fmt, direction, layout, device=torch.device("meta"), transposed=transposed, dtype=data.dtype
        )
        parts: dict[str, Any] = {}
        for part in _PARTS:
            expected = getattr(needed, part)
            if expected is None:
                continue
            buffer = parts[part] = data if part == "data" else rest.pop(f"{key}.{name}.{part}")
            if buffer.shape != expected.shape or buffer.dtype != expected.dtype:
                raise ValueError(
                    f"{key}.{name}.{part} has dtype {buffer.dtype} and shape {list(buffer.shape)}, but a {name} "
                    f"{fmt.name} plane of a tensor of shape {list(layout)} needs {expected.dtype} and "
                    f"{list(expected.shape)}"
                )
        yield replace(needed, **parts)
