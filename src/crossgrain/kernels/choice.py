"""Which backend serves which device."""

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
"""By the type of the device: what `backend_for` has answered since the choice was last changed."""


def backend_for(device_type: str) -> Backend:
    """The backend for tensors on a device: compiled kernels on the CPU, the reference elsewhere."""
    compiled = _chosen != "reference" and device_type == "cpu"
    backend = serving[device_type] = (_cpu or _load_cpu_backend()) if compiled else REFERENCE
    return backend


def set_backend(name: str) -> None:
    """``"auto"`` (the default), ``"cpu"`` for the compiled kernels, or ``"reference"`` for debugging.

    They give the same bytes. ``"cpu"`` fails where ``"auto"`` would fall back to the reference.
    """
    global _chosen, _cpu
    if name not in ("auto", "cpu", "reference"):
        raise ValueError(f"a backend is 'auto', 'cpu' or 'reference', not {name!r}")
    if name == "cpu" and importlib.util.find_spec("numba") is None:
        raise RuntimeError("the cpu backend needs numba, which is not installed")
    if name == "cpu" and _cpu is REFERENCE:
        _cpu = None
    _chosen = name
    serving.clear()


@contextmanager
def using_backend(name: str) -> Iterator[None]:
    """`set_backend` for the duration of a ``with`` block, in all threads."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def get_backend(device_type: str = "cpu") -> str:
    """The name of the backend that serves a device."""
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
        warnings.warn(f"crossgrain: no compiled CPU kernels, the slow reference serves instead: {error}", stacklevel=4)
        _cpu = REFERENCE
    else:
        _cpu = CpuBackend()
    return _cpu
