"""Find the model inside what data parallelism and compilers have wrapped around it."""

from __future__ import annotations

from typing import Any

from torch import nn

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: without `torch.compile`, data parallelism, FSDP1 and DeepSpeed around it."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif type(inner).__name__ in _WRAPPERS:
            inner = inner.module
        else:
            return inner  # type: ignore[no-any-return]


def is_converted(model: nn.Module) -> bool:
    """Whether layers of a model are bound to a recipe."""
    return any(getattr(module, "bound_recipe", None) is not None for module in model.modules())


def why_too_late(model: nn.Module) -> str | None:
    """Why a model can no longer be converted: its parameters have been cut or flattened. None if it can."""
    inner: Any = model
    while True:
        if type(inner).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            return f"it is wrapped in {type(inner).__name__}, which has its own copies of the parameters"
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif type(inner).__name__ in _WRAPPERS:
            inner = inner.module
        else:
            break
    for name, parameter in inner.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            return f"{name} is cut into shards"
    return None
