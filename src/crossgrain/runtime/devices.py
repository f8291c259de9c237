"""Which device to use when none is given, or when CUDA is not available."""

from __future__ import annotations

import warnings

import torch

from .callers import levels_to_caller

_warned = False


def resolved_device(device: torch.device | str | int | None) -> torch.device:
    """The device to use. None is torch's default device. Without CUDA, "cuda" is the CPU, with one warning."""
    if device is None:
        return torch.get_default_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or torch.cuda.is_available():
        return device
    _warn_once()
    return torch.device("cpu")


def accelerator() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            'the device "cuda" was requested, but CUDA is not available: the CPU is used instead, here and from now on',
            stacklevel=levels_to_caller(),
        )
