"""The extra state of a module in a state dict: scales and amax histories of delayed scaling.

It is a plain dict of tensors and numbers:

    {"version": 1, "forward.scale": [n], "forward.amax_history": [length, n], "forward.fp8_dtype": 7, "backward...."}

It is empty for recipes without histories. A module that has no quantizers yet keeps the dict, and loads it when it
creates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.dtypes import fp8_dtype
from .delayed_state import DelayedScalingRecipeState
from .state import RecipeState

VERSION = 1
_FIELDS = ("scale", "amax_history", "fp8_dtype")


def extra_state_of(forward: RecipeState | None, backward: RecipeState | None) -> dict[str, Any]:
    """The scales and histories of both passes; an empty dict if the recipe keeps none."""
    extra: dict[str, Any] = {}
    for mode, state in _delayed(forward, backward).items():
        extra[f"{mode}.scale"] = state.scale.detach().clone()
        extra[f"{mode}.amax_history"] = state.amax_history.detach().clone()
        extra[f"{mode}.fp8_dtype"] = int(state.dtype)
    return {"version": VERSION, **extra} if extra else {}


def check_extra_state(extra: Any, name: str = "module") -> None:
    """Check that a value is an extra state: what `extra_state_of` returns, None, or something empty.

    Args:
        extra: the value from a state dict.
        name: name of the module, for messages.

    Raises:
        TypeError: it is not a dict, or has a value of a wrong type.
        ValueError: a field is missing, unknown or wrong.
    """
    if is_empty(extra):
        return
    if not isinstance(extra, Mapping):
        raise TypeError(
            f"{name}: the extra state must be a dict of tensors and numbers, not a {type(extra).__name__}. Remove the "
            "key from the state dict to start with new histories"
        )
    if extra.get("version") != VERSION:
        raise ValueError(
            f"{name}: the extra state has version {extra.get('version')!r}, but only version {VERSION} can be read"
        )
    unknown = set(extra) - {"version"} - {f"{mode}.{field}" for mode in ("forward", "backward") for field in _FIELDS}
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
    """
    check_extra_state(extra, name)
    extra = None if is_empty(extra) else extra
    states = _delayed(forward, backward)
    if extra is None or not states:
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


def is_empty(extra: Any) -> bool:
    """None, an empty dict, or an empty tensor: Transformer Engine writes that for recipes without histories."""
    if isinstance(extra, Tensor):
        return extra.numel() == 0
    return extra is None or (isinstance(extra, Mapping) and not extra)


def _modes_in(extra: Mapping[str, Any]) -> list[str]:
    return [mode for mode in ("forward", "backward") if any(f"{mode}.{field}" in extra for field in _FIELDS)]


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
