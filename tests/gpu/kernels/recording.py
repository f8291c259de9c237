"""A launcher that runs nothing and keeps what it was asked to run, and the backend with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.kernels.triton.traits import cuda_traits


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for."""

    kernel: str
    programs: int
    device: torch.device
    arguments: dict[str, Any]


@dataclass
class Recorder:
    """Launches that were asked for, in their order."""

    launches: list[Launch] = field(default_factory=list)

    def __call__(self, kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
        assert warps >= 1 and warps & (warps - 1) == 0, f"{warps} warps"
        assert programs >= 1
        self.launches.append(Launch(kernel.fn.__name__, programs, device, arguments))

    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return [launch.kernel for launch in self.launches]


def recording_backend() -> tuple[TritonBackend, Recorder]:
    """The backend as on an H100, and what it launches."""
    recorder = Recorder()
    return TritonBackend(recorder, cuda_traits((9, 0))), recorder
