"""Versions of crossgrain, of what it needs, and of the programs that it works with."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

from ...runtime.version import PACKAGE_VERSION
from .findings import Package

CLIENTS = (
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "lightning-fabric",
    "torchtitan",
    "megatron-core",
    "transformer-engine",
    "torchao",
    "peft",
    "compressed-tensors",
    "nvidia-modelopt",
    "safetensors",
    "gguf",
    "ml_dtypes",
    "matplotlib",
    "pyyaml",
    "tensorboard",
    "wandb",
)


def needed_packages() -> tuple[Package, ...]:
    """crossgrain, Python, and what kernels are made with."""
    return (
        Package("crossgrain", PACKAGE_VERSION),
        Package("Python", platform.python_version()),
        _imported("torch", _import_torch),
        _imported("numpy", _import_numpy),
        _imported("numba", _import_numba),
        _imported("triton", _import_triton),
    )


def client_packages() -> tuple[Package, ...]:
    """The other programs that are installed. They are not imported, which would take long."""
    found = [Package(name, installed_version(name)) for name in CLIENTS]
    return tuple(each for each in found if each.version is not None)


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _imported(name: str, load: Callable[[], str]) -> Package:
    """A package, and what is raised when it is imported."""
    try:
        return Package(name, load())
    except Exception as error:
        version = installed_version(name)
        if version is None:
            return Package(name, None)
        return Package(name, version, f"importing it raised {type(error).__name__}: {error}")


def _import_torch() -> str:
    import torch

    return str(torch.__version__)


def _import_numpy() -> str:
    import numpy

    return numpy.__version__


def _import_numba() -> str:
    import numba

    return str(numba.__version__)


def _import_triton() -> str:
    import triton

    return str(triton.__version__)
