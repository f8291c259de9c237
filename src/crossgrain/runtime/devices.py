"""Which device to use when none is given, or when CUDA is not available."""

from __future__ import annotations

import torch

from .logs import warn


def resolved_device(device: torch.device | str | int | None) -> torch.device:
    """The device to use, as tensors name it: "cuda" is the current GPU, "cuda:0".

    None is torch's default device. Without CUDA, "cuda" is the CPU, with one warning.
    """
    if device is None:
        device = torch.get_default_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        warn(
            __name__,
            'the device "cuda" was requested, but CUDA is not available: the CPU is used instead, here and from now on',
        )
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def accelerator() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
