"""Options that modules have in common, resolved or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.devices import resolved_device


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
