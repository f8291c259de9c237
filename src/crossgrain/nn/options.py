"""Options that modules have in common, resolved or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime.devices import resolved_device


def activation_dtype(x: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """What a module computes in: what torch.autocast says, else ``otherwise``, by default the input's dtype."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if otherwise is None else otherwise


def parameter_options(params_dtype: torch.dtype | None, device: torch.device | str | int | None) -> dict[str, Any]:
    """For ``torch.empty``."""
    return {"dtype": params_dtype or torch.get_default_dtype(), "device": resolved_device(device)}


def refuse_gpu_options(layer: str, options: Mapping[str, Any]) -> None:
    """Overlap of communication and the like are accepted as long as they are off."""
    for name, value in options.items():
        if not (name.startswith("ub_") or name == "symmetric_ar_type"):
            raise TypeError(f"{layer} has no option {name!r}")
        if value not in (None, False) and name != "ub_name":
            raise NotImplementedError(f"{layer}: {name} is an option of GPU communication; leave it off")
