"""Find the model inside what data parallelism and compilers have wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..recipe import Recipe

_COPYING = ("FullyShardedDataParallel", "DeepSpeedEngine")  # have parameters of their own
_WRAPPERS = ("DistributedDataParallel", "DataParallel", *_COPYING)


def _inwards(model: nn.Module) -> Iterator[nn.Module]:
    """A model, what it is wrapped around, and so on."""
    inner: Any = model
    while True:
        yield inner
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif type(inner).__name__ in _WRAPPERS:
            inner = inner.module
        else:
            return


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: without `torch.compile`, data parallelism, FSDP1 and DeepSpeed around it."""
    return list(_inwards(model))[-1]


def is_converted(model: nn.Module) -> bool:
    """Whether layers of a model are bound to a recipe."""
    return any(getattr(module, "bound_recipe", None) is not None for module in model.modules())


def is_bound_to(model: nn.Module, recipe: Recipe) -> bool:
    """Whether a model is converted, and all its layers are bound to this very recipe."""
    bound = [getattr(module, "bound_recipe", None) for module in model.modules()]
    return is_converted(model) and all(each is None or each is recipe for each in bound)


def why_too_late(model: nn.Module) -> str | None:
    """Why a model can no longer be converted: its parameters have been cut or flattened. None if it can."""
    for each in _inwards(model):
        if type(each).__name__ in _COPYING:
            return f"it is wrapped in {type(each).__name__}, which has its own copies of the parameters"
    for name, parameter in unwrapped(model).named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            return f"{name} is cut into shards"
    return None
