"""Choose the backend for a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.logs import warn
from .backend import Backend
from .reference import ReferenceBackend

REFERENCE: Backend = ReferenceBackend()

BACKENDS = ("auto", "cpu", "triton", "reference")

_chosen: str = "auto"
_cpu: Backend | None = None
_triton: Backend | None = None

serving: dict[str, Backend] = {}
"""A cache of `backend_for`, by the type of the device. It is cleared when the choice changes."""


def backend_for(device_type: str) -> Backend:
    """The backend for tensors on a type of device: compiled kernels on CPUs and GPUs, the reference on all others."""
    backend = REFERENCE
    if _chosen != "reference" and device_type == "cpu":
        backend = _cpu or _load_cpu_backend()
    elif _chosen != "reference" and device_type == "cuda":  # which is also what torch calls AMD's GPUs
        backend = _triton or _load_triton_backend()
    serving[device_type] = backend
    return backend


def set_backend(name: str) -> None:
    """Choose the kernels that crossgrain uses. All of them give the same bytes.

    Args:
        name: "auto" (the default) for compiled kernels on CPUs and GPUs, or the reference where they are not available;
            "cpu" for the same, with an error if numba is missing, which compiles for CPUs; "triton" for the same, with
            an error if Triton is missing, which compiles for GPUs; "reference" for plain torch, for debugging.

    Raises:
        ValueError: there is no backend of this name.
        RuntimeError: "cpu" is chosen, and numba is not installed, or "triton", and Triton is not.

    Examples:
        >>> cg.set_backend("reference")
        >>> cg.get_backend()
        'reference'
        >>> cg.set_backend("auto")
    """
    global _chosen, _cpu, _triton
    if name not in BACKENDS:
        raise ValueError(f"the backend must be 'auto', 'cpu', 'triton' or 'reference', got {name!r}")
    if name == "cpu" and importlib.util.find_spec("numba") is None:
        raise RuntimeError("the backend 'cpu' needs numba, which is not installed")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise RuntimeError("the backend 'triton' needs Triton, which is not installed: pip install crossgrain[gpu]")
    if name == "cpu" and _cpu is REFERENCE:
        _cpu = None
    if name == "triton" and _triton is REFERENCE:
        _triton = None
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
    """The name of the backend for a type of device: "cpu", "triton" or "reference".

    Args:
        device_type: "cpu", "cuda", or another type of device that torch knows.

    Examples:
        >>> cg.get_backend("meta")  # tensors without numbers
        'reference'
    """
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
        warn(
            __name__,
            f"compiled CPU kernels are not available, the slow reference is used instead: {error}",
        )
        _cpu = REFERENCE
    else:
        _cpu = CpuBackend()
    return _cpu


def _load_triton_backend() -> Backend:
    """Import the kernels for GPUs, and with them Triton, when they are first needed."""
    global _triton
    try:
        from .triton.backend import TritonBackend
    except (ImportError, AttributeError) as error:  # an old Triton lacks names
        warn(
            __name__,
            "Triton 3.6 or later, which compiles kernels for GPUs, is not available, the slow reference is "
            f"used instead: {error}. Install it with pip install crossgrain[gpu]",
        )
        _triton = REFERENCE
    else:
        _triton = TritonBackend()
    return _triton
