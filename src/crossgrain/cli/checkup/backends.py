"""The kernels for CPUs and GPUs, and the cache of compiled ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...kernels.backend import Backend as Kernels
from ...kernels.choice import backend_for
from ...runtime.logs import withheld
from .findings import Backend, KernelCache


class Loaded(NamedTuple):
    """Kernels for a type of device.

    Attributes:
        kernels: the kernels; None if loading them raised an error.
        said: the error, or what was warned about; None if nothing was said.
    """

    kernels: Kernels | None
    said: str | None

    def has(self, name: str) -> bool:
        """Whether these are the kernels of this name."""
        return self.kernels is not None and self.kernels.name == name


def load(device_type: str) -> Loaded:
    """Load the kernels for a type of device, which imports numba or Triton."""
    with withheld() as warned:
        try:
            kernels = backend_for(device_type)
        except Exception as error:
            return Loaded(None, f"loading them raised {type(error).__name__}: {error}")
    return Loaded(kernels, "; ".join(warned) or None)


def described(device_type: str, loaded: Loaded, usual: str, absent: str | None) -> Backend:
    """A backend in words.

    Args:
        device_type: the type of device.
        loaded: what serves it.
        usual: the name of the kernels that should serve it.
        absent: why there is no such device; None if there is one.
    """
    kernels, said = loaded
    if kernels is None:
        return Backend(device_type, None, said, broken=True)
    if kernels.name != usual and said is None:
        said = f"the {usual} kernels are not available, or are switched off"
    if absent is not None:
        return Backend(device_type, None, f"no such device; {said or f'{usual} kernels are ready for one'}")
    return Backend(device_type, kernels.name, said)


def kernel_cache(directory: str | None) -> KernelCache:
    """The cache of compiled CPU kernels, which lies in ``directory``."""
    if directory is None:
        return KernelCache(None)
    try:
        sizes = [path.stat().st_size for path in Path(directory).iterdir() if path.suffix in (".nbi", ".nbc")]
    except OSError:
        return KernelCache(directory)
    return KernelCache(directory, len(sizes), sum(sizes), os.access(directory, os.W_OK))


def cache_directory() -> str | None:
    """Where compiled CPU kernels are stored; None if none was compiled, or nowhere."""
    try:
        from ...kernels.cpu.runtime import compiled_so_far
    except Exception:  # numba is missing or broken, which `packages` tells
        return None
    return compiled_so_far().directory
