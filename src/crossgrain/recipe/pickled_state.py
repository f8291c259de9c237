"""Extra states that Transformer Engine has pickled.

Loading a pickle can run any code, so crossgrain never does, whatever the environment says. The pickle is only read as a
list of instructions (`pickletools`). If it names no class at all, or a recipe that keeps no histories and none of the
keys of histories, nothing in it is needed, and it is ignored. Everything else is refused.
"""

from __future__ import annotations

import enum
import os
import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from .base import RecipeFields
from .custom import CustomRecipe
from .extra_state import is_encoded
from .gemm_recipe import GemmRecipe

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Transformer Engine's environment variable that allows unpickling. Modules of crossgrain do not unpickle with it."""

_THEIR_RECIPES = "transformer_engine.common.recipe"
_RECIPE = "recipe"
_HISTORIES = frozenset({"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"})
_STRINGS = ("STRING", "UNICODE")  # part of the names of all instructions that push a text
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})


class CheckpointExtraStatePolicy(enum.Enum):
    """What the class of a recipe says about a pickled extra state."""

    STATELESS = "stateless"  # it holds nothing that is needed
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"  # it holds scales and histories
    DYNAMIC = "dynamic"  # it holds them if their keys are there


_POLICY_OF: dict[type[Recipe], CheckpointExtraStatePolicy] = {
    DelayedScaling: CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING,
    Float8CurrentScaling: CheckpointExtraStatePolicy.STATELESS,
    MXFP8BlockScaling: CheckpointExtraStatePolicy.STATELESS,
    Float8BlockScaling: CheckpointExtraStatePolicy.STATELESS,
    NVFP4BlockScaling: CheckpointExtraStatePolicy.STATELESS,
    RecipeFields: CheckpointExtraStatePolicy.DYNAMIC,
    CustomRecipe: CheckpointExtraStatePolicy.DYNAMIC,
    GemmRecipe: CheckpointExtraStatePolicy.DYNAMIC,
}

# The classes that a pickle may name: by the module of Transformer Engine, and by their own.
_RECIPE_POLICIES: dict[tuple[str, str], CheckpointExtraStatePolicy] = {
    (module, recipe.__name__): policy
    for recipe, policy in _POLICY_OF.items()
    for module in (_THEIR_RECIPES, recipe.__module__)
}


def unsafe_pickle_extra_state_enabled() -> bool:
    """Whether the environment allows other programs to unpickle extra states."""
    return os.environ.get(UNSAFE_PICKLE_EXTRA_STATE_ENV, "0") == "1"


def extra_state_pickle_advisory(context: str) -> str:
    """The message about an extra state that is refused; ``context`` is the name of the module."""
    return (
        f"{context}: the extra state is a pickle, which may run any code when it is loaded, and which is not known to "
        "hold nothing. crossgrain does not load it, also if "
        f"{UNSAFE_PICKLE_EXTRA_STATE_ENV}=1 is set: that is for Transformer Engine. Remove this _extra_state from the "
        "state dict to start with new scales and histories; weights are not affected"
    )


def should_load_extra_state_pickle(data: bytes, context: str) -> bool:
    """Whether a program that unpickles extra states itself should do so with this one, as Transformer Engine says.

    Args:
        data: the pickle. It is not loaded.
        context: name of the module, for the message.

    Returns:
        False if it holds nothing that is needed. True if it may hold something, and the environment allows to load it.

    Raises:
        RuntimeError: it may hold something, and the environment does not allow to load it.
    """
    if holds_nothing(data):
        return False
    if unsafe_pickle_extra_state_enabled():
        return True
    raise RuntimeError(extra_state_pickle_advisory(context))


def passes_over(extra: Any, name: str = "module") -> bool:
    """Whether ``extra`` can be ignored: there is none, or it is a pickle that holds nothing.

    Args:
        extra: the value from a state dict.
        name: name of the module, for the message.

    Raises:
        RuntimeError: it is a pickle that may hold something, or bytes that are no pickle.
    """
    if _stands_for_nothing(extra):
        return True
    if not (isinstance(extra, Tensor) and extra.dtype == torch.uint8 and extra.numel()) or is_encoded(extra):
        return False
    if not holds_nothing(bytes(extra.detach().cpu().numpy())):
        raise RuntimeError(extra_state_pickle_advisory(name))
    return True


def holds_nothing(data: bytes) -> bool:
    """Whether a pickle is known to hold no scales or histories. It is not loaded."""
    try:
        texts, classes = _contents(data)
    except Exception:  # what cannot be read may hold anything
        return False
    if texts & _HISTORIES:
        return False
    if not classes:
        return True
    policies = {_RECIPE_POLICIES[each] for each in classes if each in _RECIPE_POLICIES}
    stateful = CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING in policies
    return _RECIPE in texts and bool(policies) and not stateful


class _Contents(NamedTuple):
    texts: frozenset[str]
    classes: frozenset[tuple[str, str]]


def _contents(data: bytes) -> _Contents:
    """All texts in a pickle, and the module and name of all classes and functions that it would use."""
    pushed: list[str] = []
    classes = set()
    for instruction, argument, text in _with_texts(data):
        if text is not None:
            pushed.append(text)
        elif instruction == "GLOBAL":
            module, _, name = argument.partition(" ")
            classes.add((module, name))
        elif instruction == "STACK_GLOBAL":
            module, name = pushed[-2:]
            classes.add((module, name))
    return _Contents(frozenset(pushed), frozenset(classes))


def _with_texts(data: bytes) -> Iterator[tuple[str, Any, str | None]]:
    """The instructions of a pickle, their arguments, and the texts that they push, also from the memo."""
    memo: dict[int, str | None] = {}
    top: str | None = None
    for opcode, argument, _ in pickletools.genops(data):
        instruction, text, place = opcode.name, None, len(memo) if argument is None else argument
        if any(kind in instruction for kind in _STRINGS):
            text = argument.decode() if isinstance(argument, bytes) else argument
        elif instruction in _GET:
            text = memo.get(int(place))
        elif instruction in _PUT or instruction == "MEMOIZE":
            memo[int(place)] = top
        top = text
        yield instruction, argument, text


def _stands_for_nothing(extra: Any) -> bool:
    """Whether this is the marker of `torch.distributed.checkpoint.state_dict` for an extra state that is not there."""
    kind = type(extra)
    return (kind.__module__, kind.__name__) == ("torch.distributed.checkpoint.state_dict", "_EXTRA_STATE")
