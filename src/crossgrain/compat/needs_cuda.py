"""Names whose work only a GPU can do: they can be imported, and say so when they are used."""

from __future__ import annotations

from typing import Any, NoReturn


class NeedsCudaError(NotImplementedError):
    """What was called exists for CUDA only."""


def _refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    raise NeedsCudaError(f"{cls.__name__} needs CUDA: it drives kernels of a GPU, and crossgrain has none of its kind")


def needs_cuda(name: str) -> type:
    """A class that stands for the function or class ``name``: it can be imported and asked about, not called."""
    return type(name, (), {"__new__": _refuse, "__doc__": "Needs CUDA.", "__module__": __name__})


def all_need_cuda(*names: str) -> dict[str, type]:
    """For a table of names."""
    return {name: needs_cuda(name) for name in names}
