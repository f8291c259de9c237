"""Directories that `save_pretrained` writes: the recipe in them, and the histories of delayed scaling."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..convert import ConvertReport
from ..files.random_state import get_random_state, set_random_state
from ..nn.state_dicts import StateDicts
from ..runtime.logs import warn
from .conversion import Choices, Conversion
from .wrappers import is_converted

_EXTRA_STATE = "_extra_state"  # torch's name


def convert_from(
    model: nn.Module, directory: str | os.PathLike[str], *, skip: Choices = None, include: Choices = None
) -> ConvertReport:
    """Convert a model like the one that was saved in a directory, and load its histories of delayed scaling.

        model = AutoModelForCausalLM.from_pretrained(directory)
        convert_from(model, directory)

    Args:
        model: the model, with the weights of the directory.
        directory: what `save_pretrained` of a converted model, or a `Trainer` with a `CrossgrainCallback`, has written.
        skip: layers not to convert, if they were given as types or functions.
        include: layers to convert that are not by default, if they were given as types or functions.

    Returns:
        What was converted.

    Raises:
        FileNotFoundError: the directory has no `crossgrain.json`.
        ValueError: that file is damaged, or the directory has histories of layers that the model does not have.
    """
    conversion, schedule = Conversion.load(directory)
    histories = _saved_histories(Path(directory))
    report = conversion.convert(model, skip, include, schedule)
    layers = {_joined(path): module for path, module in model.named_modules() if isinstance(module, StateDicts)}
    in_files = {name: key for key, name in _names_in_files(model, layers).items()}
    unknown = sorted(histories.keys() - in_files.keys())
    if unknown:
        raise ValueError(f"{directory} has histories of layers that the model does not have: {', '.join(unknown[:5])}")
    if report.recipe.may_keep_histories() and not histories:
        warn(__name__, f"{directory} has no histories of delayed scaling, so the scales of this model start anew")
    for name, extra in histories.items():
        layers[in_files[name]].set_extra_state(extra)
    return report


def save_with_pretrained(model: nn.Module, save: Callable[[Path], None]) -> None:
    """Make `save_pretrained` of this model also write `crossgrain.json`: it calls ``save`` with the directory."""
    if hasattr(type(model), "save_pretrained"):
        object.__setattr__(model, "save_pretrained", partial(_save_pretrained, model, save))


def _save_pretrained(model: Any, save: Callable[[Path], None], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if is_converted(model) and kwargs.get("is_main_process", True) and Path(save_directory).is_dir():
        save(Path(save_directory))
    return result


# ---- names -----------------------------------------------------------------------------------------------


def load_original_names(model: nn.Module) -> None:
    """Make `load_state_dict` of this model understand the names under which `save_pretrained` saves.

    transformers saves some models, those with fused experts for example, under the names of their original
    checkpoints. `from_pretrained` reads these, but when a `Trainer` resumes it calls `load_state_dict`, which would
    leave such weights as they are.
    """
    if isinstance(model, PreTrainedModel):
        hooks = getattr(model, "_load_state_dict_pre_hooks", {})
        if not any(getattr(hook, "hook", hook) is _with_names_of_model for hook in hooks.values()):
            model.register_load_state_dict_pre_hook(_with_names_of_model)


def _with_names_of_model(model: Any, state_dict: Any, prefix: str, *unused: Any) -> None:
    own = {key for key in model.state_dict() if not key.endswith(_EXTRA_STATE)}
    weights = {key: value for key, value in state_dict.items() if not key.endswith(_EXTRA_STATE)}
    if prefix or own <= weights.keys() or weights.keys() <= own:
        return
    before = get_random_state()  # from_pretrained initializes what it does not find
    plain, about = type(model).from_pretrained(
        None, config=model.config, state_dict=dict(weights), dtype=model.dtype, output_loading_info=True
    )
    set_random_state(before)
    found = {key: value for key, value in plain.state_dict().items() if key not in about["missing_keys"]}
    if not found.keys() > weights.keys() & own:
        return  # these are not the names of transformers either
    layers = [_joined(path) for path, module in model.named_modules() if isinstance(module, StateDicts)]
    renamed = {name: key for key, name in _names_in_files(model, layers).items()}
    histories = {key: value for key, value in state_dict.items() if key.endswith(_EXTRA_STATE)}
    unknown = {key: weights[key] for key in about["unexpected_keys"] if key in weights}
    state_dict.clear()
    state_dict.update({**found, **unknown})
    state_dict.update({renamed.get(name, name): extra for name, extra in histories.items()})


def _names_in_files(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """The name that `save_pretrained` gives to each of these extra states."""
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {key: key for key in keys}
    return {key: next(iter(revert_weight_conversion(model, {key: torch.empty(0)}))) for key in keys}


def _joined(path: str) -> str:
    return f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE


def _saved_histories(directory: Path) -> dict[str, Tensor]:
    """The extra states in the files of a directory, by their names there."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:  # a directory of adapters has no weights of the model
        files = ["model.safetensors"] if (directory / "model.safetensors").exists() else []
    found = {}
    for file in files:
        if not (directory / file).is_file():
            raise FileNotFoundError(f"{directory} has no {file}, which {index.name} names")
        with safe_open(directory / file, framework="pt") as tensors:
            found.update({key: tensors.get_tensor(key) for key in tensors.keys() if key.endswith(_EXTRA_STATE)})  # noqa: SIM118
    return found
