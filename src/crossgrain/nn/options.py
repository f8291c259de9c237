"""Helpers for options that several modules have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.devices import resolved_device


def parameter_options(params_dtype: torch.dtype | None, device: torch.device | str | int | None) -> dict[str, Any]:
    """The keyword arguments of ``torch.empty`` for new parameters."""
    return {"dtype": params_dtype or torch.get_default_dtype(), "device": resolved_device(device)}


def refuse_gpu_options(layer: str, options: Mapping[str, Any]) -> None:
    """Raise for unknown options, and for options of GPU communication (``ub_*``) unless they are off."""
    for name, value in options.items():
        if not (name.startswith("ub_") or name == "symmetric_ar_type"):
            raise TypeError(f"{layer} has no option {name!r}")
        if value not in (None, False) and name != "ub_name":
            raise NotImplementedError(
                f"{layer}: the option {name} is about GPU communication and is not supported; leave it out"
            )
