"""`Gpu`: what decides which GEMMs a device has, and `machine`, which says what the devices of this process are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...runtime.gpu_capability import capability_of
from .scaled_call import ScaledCall, run


@dataclass(frozen=True)
class Gpu:
    """A GPU, and the torch that runs on it.

    Attributes:
        capability: compute capability, such as (9, 0) for H100; of an AMD GPU, what torch says.
        arch: name of an AMD architecture, such as "gfx950"; None for NVIDIA.
        cuda: the version of CUDA for which torch was built.
        has_kernels: torch was built with kernels for GPUs. One for CPUs has none, also if it can name such devices.
    """

    capability: tuple[int, int]
    arch: str | None = None
    cuda: tuple[int, int] = (12, 9)
    has_kernels: bool = True

    def __str__(self) -> str:
        return self.arch or f"compute capability {self.capability[0]}.{self.capability[1]}"


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU of a device; None for a device of another type. Asking does not wait for the device."""
    return _gpu(device, capability_of(device)) if device.type == "cuda" else None


@lru_cache(maxsize=64)
def _gpu(device: torch.device, capability: tuple[int, int]) -> Gpu:
    arch = None
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CUDA")
    return Gpu(capability, arch, (int(major), int(minor)), has_kernels)


@dataclass
class Machine:
    """What the GEMMs of this process run on. Tests replace its parts, to show native GEMMs without a GPU.

    Attributes:
        gpu_of: the GPU of a device.
        run: calls torch's ``scaled_mm``.
        for_cpu: tensors of the CPU are multiplied as those of a GPU are.
    """

    gpu_of: Callable[[torch.device], Gpu | None] = gpu_of
    run: Callable[[ScaledCall], Tensor] = run
    for_cpu: bool = False

    @contextmanager
    def replaced(self, gpu: Gpu, run: Callable[[ScaledCall], Tensor] = run) -> Iterator[None]:
        """A context manager in which all devices, also the CPU, are ``gpu``, and ``run`` multiplies.

        Args:
            gpu: the GPU.
            run: what is called instead of torch's ``scaled_mm``.
        """
        before = self.gpu_of, self.run, self.for_cpu
        self.gpu_of, self.run, self.for_cpu = (lambda device: gpu), run, True
        try:
            yield
        finally:
            self.gpu_of, self.run, self.for_cpu = before


machine = Machine()
