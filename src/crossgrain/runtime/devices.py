"""Which device is meant."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_warned = False


def resolved_device(device: torch.device | str | int | None) -> torch.device:
    """The default device for None. Without CUDA, "cuda" means the CPU, of which one warning tells."""
    if device is None:
        return torch.get_default_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or torch.cuda.is_available():
        return device
    _warn_once()
    return torch.device("cpu")


def accelerator() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            'the device "cuda" is asked for where there is none: the CPU takes its place, here and from now on',
            stacklevel=_levels_to_caller(),
        )


def _levels_to_caller() -> int:
    """How far up whoever called this package is, as seen by `warnings.warn` in `_warn_once`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
