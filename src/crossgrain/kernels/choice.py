"""Choose the backend for a device."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .backend import Backend
from .reference import ReferenceBackend

REFERENCE: Backend = ReferenceBackend()

_chosen: str = "auto"
_cpu: Backend | None = None

serving: dict[str, Backend] = {}
"""A cache of `backend_for`, by the type of the device. It is cleared when the choice changes."""


def backend_for(device_type: str) -> Backend:
    """The backend for tensors on a type of device: compiled kernels on the CPU, the reference on all others."""
    compiled = _chosen != "reference" and device_type == "cpu"
    backend = serving[device_type] = (_cpu or _load_cpu_backend()) if compiled else REFERENCE
    return backend


def set_backend(name: str) -> None:
    """Choose the kernels that crossgrain uses. All of them give the same bytes.

    Args:
        name: "auto" (the default) for compiled kernels on the CPU, or the reference if they are not available;
            "cpu" for compiled kernels, with an error if numba is missing; "reference" for plain torch, for debugging.

    Raises:
        ValueError: there is no backend of this name.
        RuntimeError: "cpu" is chosen, and numba is not installed.
    """
    global _chosen, _cpu
    if name not in ("auto", "cpu", "reference"):
        raise ValueError(f"the backend must be 'auto', 'cpu' or 'reference', got {name!r}")
    if name == "cpu" and importlib.util.find_spec("numba") is None:
        raise RuntimeError("the backend 'cpu' needs numba, which is not installed")
    if name == "cpu" and _cpu is REFERENCE:
        _cpu = None
    _chosen = name
    serving.clear()


@contextmanager
def using_backend(name: str) -> Iterator[None]:
    """A context manager that chooses a backend for a block, in all threads."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def get_backend(device_type: str = "cpu") -> str:
    """The name of the backend for a type of device: "cpu" or "reference"."""
    return backend_for(device_type).name


def _load_cpu_backend() -> Backend:
    """Import the compiled kernels, which takes half a second, when they are first needed."""
    global _cpu
    try:
        from numba.core import config

        if getattr(config, "DISABLE_JIT", False):
            raise ImportError("numba is disabled (NUMBA_DISABLE_JIT)")
        from .cpu.backend import CpuBackend
    except ImportError as error:
        warnings.warn(
            f"crossgrain: compiled CPU kernels are not available, the slow reference is used instead: {error}",
            stacklevel=4,
        )
        _cpu = REFERENCE
    else:
        _cpu = CpuBackend()
    return _cpu
