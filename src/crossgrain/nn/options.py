"""Helpers for options that several modules have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..runtime.devices import resolved_device


def parameter_options(params_dtype: torch.dtype | None, device: torch.device | str | int | None) -> dict[str, Any]:
    """The keyword arguments of ``torch.empty`` for new parameters."""
    return {"dtype": params_dtype or torch.get_default_dtype(), "device": resolved_device(device)}


def options_for(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor that ``function`` takes, too, under the same names.

        class Linear(LinearModule):
            def __init__(self, in_features: int, tp_group: Any = None, tp_size: int = 1, **gpu_options: Any) -> None:
                super().__init__(**options_for(LinearModule.__init__, locals()))

    So every signature lists all options, for users and their editors, and passing them on needs no second list.

    Args:
        function: what the options are for. If it has ``**options``, it gets those that were given under that name.
        arguments: the ``locals()`` of the constructor, before it has other variables.
    """
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            options |= arguments[name]
        elif name in arguments and name != "self":
            options[name] = arguments[name]
    return options


def refuse_gpu_options(layer: str, options: Mapping[str, Any]) -> None:
    """Raise for unknown options, and for options of GPU communication (``ub_*``) unless they are off."""
    for name, value in options.items():
        if not (name.startswith("ub_") or name == "symmetric_ar_type"):
            raise TypeError(f"{layer} has no option {name!r}")
        if value not in (None, False) and name != "ub_name":
            raise NotImplementedError(
                f"{layer}: the option {name} is about GPU communication and is not supported; leave it out"
            )
