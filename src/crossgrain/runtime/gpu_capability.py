"""The compute capability of the GPU on which a tensor is, which decides what its GEMMs can read."""

from __future__ import annotations

from functools import lru_cache

import torch

from .settings import settings


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a "cuda" device. Asking does not wait for it.

    Without a GPU, such tensors are fake ones, and their GPU is of the generation whose rules apply:
    ``settings.compute_capability``.
    """
    if not torch.cuda.is_available():
        return settings.compute_capability
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def multiplies_mxfp8(device: torch.device) -> bool:
    """Whether GEMMs on a device multiply MXFP8 codes: NVIDIA's from 10.0 on, unless settings.native_gemms is False."""
    if device.type != "cuda" or settings.native_gemms is False or torch.version.hip is not None:
        return False
    return capability_of(device) >= (10, 0)


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
