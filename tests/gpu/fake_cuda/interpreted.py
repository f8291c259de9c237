"""Kernels of the Triton backend on the emulated device: Triton's interpreter runs them in its memory.

TRITON_INTERPRET=1 must be in the environment before Triton is imported.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from crossgrain.kernels import choice
from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.kernels.triton.traits import SOFTWARE

from ..kernels.interpreter import checked_launch, correct
from .device import as_host_tensor


def serve_the_device() -> None:
    """Let interpreted kernels serve tensors of the device. The CPU has the reference."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy says where kernels compute infinities
    correct()
    choice._cpu, choice._triton = choice.REFERENCE, TritonBackend(_launch, SOFTWARE)
    choice.set_backend("auto")


def _launch(kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
    there = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    elsewhere = [name for name, value in there.items() if value.device.type != "cuda"]
    if elsewhere:
        raise RuntimeError(f"these arguments of a kernel are not on the device: {', '.join(elsewhere)}")
    host = {name: as_host_tensor(value) for name, value in there.items()}
    checked_launch(kernel, programs, torch.device("cpu"), warps, arguments | host)
