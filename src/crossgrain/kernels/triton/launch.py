"""Launch kernels: on the device of the tensors, on its current stream, without waiting for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Launcher(Protocol):
    """Something that runs kernels. Tests have others, which run what is compiled for GPUs that are not there."""

    def __call__(
        self, kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]
    ) -> None: ...


def launch(kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
    """Run a kernel on the current stream of ``device``, whatever the current device is.

    Args:
        kernel: the kernel.
        programs: number of programs.
        device: the device of all tensors.
        warps: warps of each program.
        arguments: all arguments of the kernel by name.
    """
    _check_devices(arguments, device)
    if device.type == "cpu":  # the interpreter
        kernel[(programs,)](**arguments, num_warps=warps, enable_fp_fusion=False)
        return
    if type(kernel).__name__ == "InterpretedFunction":
        raise RuntimeError(
            "TRITON_INTERPRET is set, so that Triton interprets kernels on the host, which does not round as a GPU "
            'does. Unset it, or use crossgrain.set_backend("reference")'
        )
    with torch.cuda.device(device):
        kernel[(programs,)](**arguments, num_warps=warps, enable_fp_fusion=False)


def _check_devices(arguments: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError if a tensor is elsewhere: a kernel would read whatever is at its address."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device != device:
            raise ValueError(f"a kernel runs on {device}, but {name} is on {value.device}: move it there")
