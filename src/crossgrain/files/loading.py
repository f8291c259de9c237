"""State dicts into models: checked first, all or nothing, and other formats only on request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..runtime.settings import settings
from ..tensor.loading import check_formats
from .undo import all_or_nothing


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    requantize: bool = False,
) -> Any:
    """``model.load_state_dict`` that leaves the model as it was if it fails.

    ``requantize``  parameters of one format may be loaded into those of another: they are decoded and rounded
                    a second time. Without it that is an error which names all such parameters.
    """
    with all_or_nothing(model):
        return load_in_place(model, state_dict, strict=strict, assign=assign, requantize=requantize)


def load_in_place(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool, requantize: bool
) -> Any:
    """The same for callers that can undo it."""
    with settings.override(requantize_on_load=True) if requantize else nullcontext():
        if not assign:
            check_formats(dict(model.named_parameters(remove_duplicate=False)), state_dict)
        return model.load_state_dict(state_dict, strict=strict, assign=assign)
