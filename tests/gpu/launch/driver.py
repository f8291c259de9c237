"""A driver for Triton: a GPU that is not there. Everything before it is what runs on a real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import driver

from crossgrain.kernels.triton.device.decode import decode_kernel
from crossgrain.kernels.triton.device.encode import encode_kernel
from crossgrain.kernels.triton.device.epilogue import epilogue_kernel
from crossgrain.kernels.triton.device.measure import amax_kernel

from ..kernels.emulated import pointer
from ..offline.compile import gpu_target
from ..ptx import run

KERNELS = (amax_kernel, decode_kernel, encode_kernel, epilogue_kernel)
SHARED_MEMORY = 232448  # bytes that a block may have


class EmulatedDriver:
    """What Triton asks of a driver.

    Args:
        target: what to compile for.
    """

    def __init__(self, target: str) -> None:
        self.launches: list[tuple[str, int, int]] = []  # name of the kernel, programs, stream
        self.stream = 7
        self._target = gpu_target(target)
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (object(), name, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> Any:
        return self._target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """The function that launches a compiled kernel."""
        made = triton.compile(source, target=self._target, options=_options(metadata))

        def launched(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            arguments = rest[4:]  # metadata and hooks come first
            memory: dict[int, Any] = {}
            taken = [
                pointer(each, memory) if isinstance(each, torch.Tensor) else each
                for each, kind in zip(arguments, source.signature.values(), strict=True)
                if kind != "constexpr"
            ]
            run(made.asm["ptx"], (x, y, z), taken, metadata.shared)
            self.launches.append((function, x * y * z, stream))

        return launched


def _options(metadata: Any) -> dict[str, Any]:
    return {"num_warps": metadata.num_warps, "enable_fp_fusion": metadata.enable_fp_fusion, "debug": metadata.debug}


@contextmanager
def emulated_driver(target: str) -> Iterator[EmulatedDriver]:
    """A context manager in which Triton has this driver."""
    mine, before = EmulatedDriver(target), driver._active
    driver.set_active(mine)
    try:
        yield mine
    finally:
        driver._active = before  # not reset_active, which looks for a GPU
        for kernel in KERNELS:
            kernel.device_caches.clear()
