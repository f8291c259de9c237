"""The extra state of a module in a state dict: scales and amax histories of delayed scaling.

It is one tensor of bytes, so that everything that saves tensors saves it: a head (see `_HEAD`), then for the forward
and the backward pass the scales [n] and the amax histories [length, n], as float32, little-endian. `read_extra_state`
gives the fields:

    {"version": 1, "forward.scale": [n], "forward.amax_history": [length, n], "forward.fp8_dtype": 7, "backward...."}

Such a dict can be loaded too; earlier versions of crossgrain have saved it. The tensor is empty for recipes without
histories. A module that has no quantizers yet keeps the tensor, and loads it when it creates them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.dtypes import fp8_dtype
from .delayed_state import DelayedScalingRecipeState
from .state import RecipeState

VERSION = 1
_MODES = ("forward", "backward")
_FIELDS = ("scale", "amax_history", "fp8_dtype")

# No pickle begins with its first byte, so Transformer Engine's extra states, which are pickles, are not taken for ours.
_MAGIC = b"\xf5crossgrain extra state"
# The magic, the version, and for each pass the number of tensors, the length of the history and the FP8 type; three
# zeros for a pass without histories.
# Its size is a multiple of 4, so that the float32 numbers after it are aligned.
_HEAD = struct.Struct(f"<{len(_MAGIC)}sB6I")
assert _HEAD.size % 4 == 0


def extra_state_of(forward: RecipeState | None, backward: RecipeState | None) -> Tensor:
    """The scales and histories of both passes as a tensor of bytes, which is empty if the recipe keeps none.

    Examples:
        >>> recipe = cg.recipe.DelayedScaling(amax_history_len=4)
        >>> state = cg.recipe.RecipeState.create(recipe, mode="forward", num_quantizers=2)

        >>> cg.recipe.extra_state_of(state, None).dtype
        torch.uint8
    """
    extra: dict[str, Any] = {}
    for mode, state in _delayed(forward, backward).items():
        extra[f"{mode}.scale"] = state.scale.detach()
        extra[f"{mode}.amax_history"] = state.amax_history.detach()
        extra[f"{mode}.fp8_dtype"] = int(state.dtype)
    return _encoded({"version": VERSION, **extra} if extra else {})


def read_extra_state(extra: Any, name: str = "module") -> dict[str, Any]:
    """The fields of an extra state: scales, amax histories and FP8 types, as in the description of this module.

    Args:
        extra: the value from a state dict: the tensor of `extra_state_of`, the dict of earlier versions, or None.
        name: name of the module, for messages.

    Returns:
        Copies of its fields; an empty dict if it is None or empty.

    Raises:
        TypeError: it is neither a tensor of bytes nor a dict, or has a value of a wrong type.
        ValueError: it is cut off, or a field is missing, unknown or wrong.

    Examples:
        >>> recipe = cg.recipe.DelayedScaling(amax_history_len=4)
        >>> state = cg.recipe.RecipeState.create(recipe, mode="forward", num_quantizers=2)

        >>> fields = cg.recipe.read_extra_state(cg.recipe.extra_state_of(state, None))
        >>> fields["forward.amax_history"].shape
        torch.Size([4, 2])
    """
    if is_empty(extra):
        return {}
    fields = _decoded(extra, name) if is_encoded(extra) else extra
    _check_fields(fields, name)
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in fields.items()}


def encoded_extra_state(extra: Any, name: str = "module") -> Tensor:
    """An extra state that `read_extra_state` accepts, as a tensor of its own."""
    return _encoded(read_extra_state(extra, name))


def is_encoded(extra: Any) -> bool:
    """Whether this is a tensor of bytes that `extra_state_of` has made, or its beginning."""
    if not isinstance(extra, Tensor) or extra.dtype != torch.uint8 or extra.dim() != 1 or extra.is_meta:
        return False
    return bytes(extra[: len(_MAGIC)].tolist()) == _MAGIC


def _encoded(fields: Mapping[str, Any]) -> Tensor:
    if not fields:
        return torch.empty(0, dtype=torch.uint8)
    numbers, tensors = [], []
    for mode in _MODES:
        if f"{mode}.scale" in fields:
            history = fields[f"{mode}.amax_history"]
            numbers += [history.shape[1], len(history), int(fields[f"{mode}.fp8_dtype"])]
            tensors += [fields[f"{mode}.scale"].reshape(-1), history.reshape(-1)]
        else:
            numbers += [0, 0, 0]
    head = torch.frombuffer(bytearray(_HEAD.pack(_MAGIC, VERSION, *numbers)), dtype=torch.uint8)
    parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    return torch.cat([head.to(parts[0].device) if parts else head, *parts])


def _decoded(extra: Tensor, name: str) -> dict[str, Any]:
    """The fields of a tensor of bytes; its size is checked, its numbers are not."""
    if extra.numel() < _HEAD.size:
        raise ValueError(f"{name}: the extra state is cut off: it has {extra.numel()} bytes, its head {_HEAD.size}")
    _, version, *numbers = _HEAD.unpack(bytes(extra[: _HEAD.size].tolist()))
    if version != VERSION:
        raise ValueError(_of_another_version(version, name))
    modes = {mode: numbers[3 * i : 3 * i + 3] for i, mode in enumerate(_MODES) if any(numbers[3 * i : 3 * i + 3])}
    size = _HEAD.size + sum(4 * count * (1 + length) for count, length, _ in modes.values())
    if extra.numel() != size:
        raise ValueError(f"{name}: the extra state has {extra.numel()} bytes, but its head describes {size}")
    values = extra[_HEAD.size :].clone().view(torch.float32)
    fields: dict[str, Any] = {"version": version}
    for mode, (count, length, dtype) in modes.items():
        scale, history, values = values.split([count, count * length, len(values) - count * (1 + length)])
        fields[f"{mode}.scale"] = scale
        fields[f"{mode}.amax_history"] = history.view(length, count)
        fields[f"{mode}.fp8_dtype"] = dtype
    return fields


def _of_another_version(version: Any, name: str) -> str:
    return f"{name}: the extra state has version {version!r}, but only version {VERSION} can be read"


def check_extra_state(extra: Any, name: str = "module") -> None:
    """Check that a value is an extra state: what `extra_state_of` returns, its fields, None, or something empty.

    Args:
        extra: the value from a state dict.
        name: name of the module, for messages.

    Raises:
        TypeError: see `read_extra_state`.
        ValueError: see `read_extra_state`.

    Examples:
        >>> cg.recipe.check_extra_state(None)  # a module without histories
        >>> cg.recipe.check_extra_state({"version": 7}, "fc1")
        Traceback (most recent call last):
        ValueError: fc1: the extra state has version 7, but only version 1 can be read
    """
    read_extra_state(extra, name)


def _check_fields(extra: Any, name: str) -> None:
    if not isinstance(extra, Mapping):
        kind = f"{extra.dtype} tensor" if isinstance(extra, Tensor) else type(extra).__name__
        raise TypeError(
            f"{name}: the extra state must be a tensor of bytes that crossgrain has made, or a dict of its fields, not "
            f"a {kind}. Remove the key from the state dict to start with new histories"
        )
    if extra.get("version") != VERSION:
        raise ValueError(_of_another_version(extra.get("version"), name))
    unknown = set(extra) - {"version"} - {f"{mode}.{field}" for mode in _MODES for field in _FIELDS}
    if unknown:
        raise ValueError(f"{name}: the extra state has unknown keys {', '.join(sorted(map(repr, unknown)))}")
    for mode in _modes_in(extra):
        _check_part(extra, mode, name)


def load_extra_state(
    extra: Any,
    forward: RecipeState | None,
    backward: RecipeState | None,
    name: str = "module",
) -> None:
    """Write an extra state into the states of a module. All of it is checked before anything is written.

    A history that is longer loses its oldest entries, one that is shorter is extended with zeros. Nothing is done if
    the recipe keeps no histories.

    Args:
        extra: the value from a state dict.
        forward: state of the forward pass; None if there is none.
        backward: state of the backward pass; None if there is none.
        name: name of the module, for messages.

    Raises:
        TypeError: see `check_extra_state`.
        ValueError: see `check_extra_state`; or the extra state is for other tensors or another FP8 type.

    Examples:
        >>> recipe = cg.recipe.DelayedScaling(amax_history_len=4)
        >>> state = cg.recipe.RecipeState.create(recipe, mode="forward", num_quantizers=2)

        >>> saved = cg.recipe.extra_state_of(state, None)
        >>> cg.recipe.load_extra_state(saved, state, None)
    """
    extra = read_extra_state(extra, name)
    states = _delayed(forward, backward)
    if not extra or not states:
        return
    for mode, state in states.items():
        _check_fits(extra, mode, state, name)
    for mode, state in states.items():
        with torch.no_grad():
            state.scale.copy_(extra[f"{mode}.scale"])
            state.amax_history.copy_(resized_history(extra[f"{mode}.amax_history"], len(state.amax_history)))


def resized_history(history: Tensor, length: int) -> Tensor:
    """A history of another length. Row 0 (the current step) and the newest rows are kept, and zeros fill the rest.

    Row 1 is the oldest, the last row the newest.
    """
    kept = history[1:][-(length - 1) :] if length > 1 else history[:0]
    padding = history.new_zeros(length - 1 - len(kept), *history.shape[1:])
    return torch.cat((history[:1], padding, kept))


def _delayed(forward: RecipeState | None, backward: RecipeState | None) -> dict[str, DelayedScalingRecipeState]:
    states = {"forward": forward, "backward": backward}
    return {mode: state.delayed for mode, state in states.items() if state is not None and state.delayed is not None}


def is_extra_state_key(key: str) -> bool:
    """Whether a key of a state dict is that of an extra state, or of a part of one."""
    return "_extra_state" in key.split(".")


def is_empty(extra: Any) -> bool:
    """None, an empty dict, or an empty tensor: Transformer Engine writes that for recipes without histories."""
    if isinstance(extra, Tensor):
        return extra.numel() == 0
    return extra is None or (isinstance(extra, Mapping) and not extra)


def _modes_in(extra: Mapping[str, Any]) -> list[str]:
    return [mode for mode in _MODES if any(f"{mode}.{field}" in extra for field in _FIELDS)]


def _check_part(extra: Mapping[str, Any], mode: str, name: str) -> None:
    missing = [field for field in _FIELDS if f"{mode}.{field}" not in extra]
    if missing:
        raise ValueError(f"{name}: the extra state has no {', '.join(f'{mode}.{field}' for field in missing)}")
    for field in ("scale", "amax_history"):
        value = extra[f"{mode}.{field}"]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: {mode}.{field} of the extra state must be a float32 tensor, got {found}")
    scale, history = extra[f"{mode}.scale"], extra[f"{mode}.amax_history"]
    if scale.dim() != 1 or history.dim() != 2 or history.shape[1] != len(scale) or not len(history):
        raise ValueError(
            f"{name}: {mode}.scale and {mode}.amax_history of the extra state must have shapes [n] and [length, n], "
            f"got {list(scale.shape)} and {list(history.shape)}"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(f"{name}: {mode}.scale of the extra state must hold positive, finite numbers")
    if (history < 0).any() or history.isnan().any():
        raise ValueError(f"{name}: {mode}.amax_history of the extra state must not hold NaN or negative numbers")
    try:
        fp8_dtype(extra[f"{mode}.fp8_dtype"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: {mode}.fp8_dtype of the extra state is {extra[f'{mode}.fp8_dtype']!r}, which is not an FP8 type"
        ) from error


def _check_fits(extra: Mapping[str, Any], mode: str, state: DelayedScalingRecipeState, name: str) -> None:
    if f"{mode}.scale" not in extra:
        raise ValueError(f"{name}: the extra state has no {mode} part, but the recipe keeps {mode} histories")
    count, dtype = len(extra[f"{mode}.scale"]), fp8_dtype(extra[f"{mode}.fp8_dtype"])
    if count != state.num_quantizers:
        raise ValueError(
            f"{name}: the extra state is for {count} {mode} tensors, but the module has {state.num_quantizers}"
        )
    if dtype is not state.dtype:
        raise ValueError(
            f"{name}: the {mode} scales of the extra state are for {dtype.name}, but the tensors of the module are "
            f"{state.dtype.name}"
        )
