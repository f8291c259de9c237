"""Load a state dict into a model: formats are checked first, and a failed load leaves the model unchanged."""

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
    """Like ``model.load_state_dict``, but if it fails, the model is unchanged.

    A copy of the model's state is held in memory while this runs.

    Args:
        model: the module to load into.
        state_dict: plain or quantized tensors by name.
        strict: as in ``torch.nn.Module.load_state_dict``.
        assign: as in ``torch.nn.Module.load_state_dict``: take the tensors themselves, including their formats, instead
            of copying them into the parameters.
        requantize: allow loading quantized values into a parameter of another format. The values are decoded and
            rounded a second time. Without it, such parameters are an error.

    Returns:
        The missing and unexpected keys, as ``torch.nn.Module.load_state_dict`` returns them.

    Raises:
        ValueError: a quantized parameter would be rounded a second time; the message names all such parameters.
        RuntimeError: torch refused the state dict (missing keys, wrong shapes).

    Examples:
        >>> model = torch.nn.Sequential(cg.Linear(32, 32))
        >>> cg.files.load_state_dict(model, model.state_dict())
        <All keys matched successfully>
    """
    with all_or_nothing(model):
        return load_in_place(model, state_dict, strict=strict, assign=assign, requantize=requantize)


def load_in_place(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool, requantize: bool
) -> Any:
    """Like `load_state_dict`, but a failure may leave the model partly loaded: the caller restores it."""
    with settings.override(requantize_on_load=True) if requantize else nullcontext():
        if not assign:
            check_formats(dict(model.named_parameters(remove_duplicate=False)), state_dict)
        return model.load_state_dict(state_dict, strict=strict, assign=assign)


def load_into(name: str, value: Any, state: Any) -> None:
    """Load the saved state of anything that is not a module.

    Raises:
        ValueError: ``state`` does not have what ``value`` looks for in it.
    """
    try:
        value.load_state_dict(state)
    except (LookupError, AttributeError, AssertionError, ArithmeticError) as error:
        raise ValueError(
            f"the saved state of {name} does not fit this {type(value).__name__}: {type(error).__name__}: {error}"
        ) from error
