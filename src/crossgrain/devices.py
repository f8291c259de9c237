"""Which device is meant."""

from __future__ import annotations

import torch


def resolved_device(device: torch.device | str | int | None) -> torch.device:
    """The default device for None; a number is that of a GPU. Without CUDA, "cuda" means the CPU."""
    if device is None:
        device = torch.get_default_device()
    elif isinstance(device, int):
        device = torch.device("cuda", device)  # torch.device(0) raises where there is no accelerator
    else:
        device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device
