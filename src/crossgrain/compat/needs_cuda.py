"""Stand-ins for names that need a GPU: they can be imported, and raise `NeedsCudaError` when they are called."""

from __future__ import annotations

from typing import Any, NoReturn


class NeedsCudaError(NotImplementedError):
    """A function or class of Transformer Engine was called that works only with CUDA."""


def _refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    raise NeedsCudaError(f"{cls.__name__} needs CUDA: it calls GPU kernels, and crossgrain has no replacement for them")


def needs_cuda(name: str) -> type:
    """A stand-in for the function or class ``name``, which can be imported and inspected, but not called."""
    return type(name, (), {"__new__": _refuse, "__doc__": "Needs CUDA.", "__module__": __name__})


def all_need_cuda(*names: str) -> dict[str, type]:
    """Stand-ins for several names, as a table."""
    return {name: needs_cuda(name) for name in names}
