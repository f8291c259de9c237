"""What of a model is exported, and under which names: quantized weights, plain tensors, its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.layers import ConvertedConv1D
from ..files.safetensors_file import cast_tensor
from ..nn.linear_module import LinearModule
from ..ops import Linear as LinearOperation
from ..recipe import GemmRecipe, Recipe, as_recipe
from ..recipe.binding import is_conv1d
from ..tensor import QuantizedTensor
from .checked_json import read_json
from .walk import ExportedWeight, bias_names, quantized_weights

Rename = Callable[[str], str] | Mapping[str, str] | None
ConfigChoice = Mapping[str, Any] | str | os.PathLike[str] | None

_WEIGHT = ".weight"
# What wrappers add to the names of the parameters inside of them, which are no names of the model.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass
class Contents:
    """What is exported.

    Attributes:
        weights: the quantized weights, by name.
        plain: all other tensors, by name; they are cast when they are written.
        left: names of the layers that stay in high precision: linear layers, embeddings, stacks of experts.
        config: the configuration of the model, as in ``config.json``.
        dtype: the dtype of plain floating-point tensors; None keeps that of each.
        notes: what the user should know.
        input_amaxes: the largest magnitude of the input of each layer that was observed, by name of the weight.
        renamed: gives a tensor its name in the files.
    """

    weights: dict[str, ExportedWeight]
    plain: dict[str, Tensor]
    left: list[str]
    config: dict[str, Any]
    dtype: torch.dtype | None
    notes: list[str] = field(default_factory=list)
    input_amaxes: dict[str, float] = field(default_factory=dict)
    renamed: Callable[[str], str] = str

    def plain_tensor(self, name: str) -> Tensor:
        """A plain tensor as it is written."""
        value = self.plain[name]
        wanted = self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype
        cast = cast_tensor(name, value, wanted)
        if isinstance(value, QuantizedTensor) and not torch.equal(
            cast.float(), value.dequantize(dtype=torch.float32).cpu()
        ):
            raise ValueError(
                f"{name} is kept quantized, and is exported as plain numbers, which {wanted} would round a second "
                "time: pass dtype=torch.float32"
            )
        return cast

    def layer(self, name: str) -> str:
        """The name of the layer of a weight."""
        return name.removesuffix(_WEIGHT)


def contents_of(
    model: nn.Module, recipe: Recipe | None, dtype: torch.dtype | None, config: ConfigChoice, rename: Rename
) -> Contents:
    """Collect what is exported of a model. Nothing is quantized yet.

    Raises:
        ValueError: two tensors would get the same name, a name is reserved, or a weight cannot be exported.
    """
    renamed = renaming(rename)
    _refuse_adapters(model)
    weights = quantized_weights(model, recipe)
    names = Names(weights)
    found = Contents({}, {}, [], config_of(model, config, dtype), dtype, renamed=renamed)
    for weight in weights:
        _add(found.weights, renamed(weight.name), weight, found)
    tied = _tied_keys(model, found.config)
    quantized_keys = {weight.key for weight in weights}
    if tied & quantized_keys:
        found.config["tie_word_embeddings"] = False
        found.notes.append(
            f"{', '.join(sorted(tied & quantized_keys))} is quantized and no longer tied to the embedding, which stays "
            "in high precision: config.json says tie_word_embeddings = false"
        )
        tied = set()
    for key, value in model.state_dict().items():
        if key in quantized_keys or key in tied or not isinstance(value, Tensor) or _is_extra_state(key):
            continue
        if value.is_meta:
            raise ValueError(f"{key} is on the meta device, so it has no values to export")
        for name, tensor in names.of_plain(key, value):
            _add(found.plain, renamed(name), tensor, found)
    found.left = [renamed(f"{path}{_WEIGHT}").removesuffix(_WEIGHT) for path in _left(model, weights)]
    return found


def bound_recipe(recipe: Recipe | str | None, model: nn.Module) -> Recipe | None:
    """A recipe of the user, bound to the layers of the model."""
    if recipe is None:
        return None
    recipe = as_recipe(recipe)
    return recipe.for_model(model) if isinstance(recipe, GemmRecipe) else recipe


def _refuse_adapters(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners"):
            raise ValueError(
                f"{path or 'the model'} has adapters of peft, which engines do not find under these names: merge them "
                "first (model.merge_and_unload()), convert the result, and export that"
            )


def _add(names: dict[str, Any], name: str, value: Any, found: Contents) -> None:
    if name in found.weights or name in found.plain:
        raise ValueError(f"two tensors would be called {name} in the export; pass rename= to tell them apart")
    if name == "__metadata__" or not name or "\0" in name:
        raise ValueError(f"a tensor cannot be called {name!r}, a name that the file format uses itself; pass rename=")
    names[name] = value


class Names:
    """Names of plain tensors: biases of layers whose weights are renamed are renamed likewise."""

    def __init__(self, weights: list[ExportedWeight]) -> None:
        self._biases: dict[str, list[str]] = {}
        for weight in weights:
            prefix = f"{weight.path}." if weight.path else ""
            for parameter, names in bias_names(weight.module).items():
                self._biases[f"{prefix}{parameter}"] = [f"{prefix}{name}" for name in names]

    def of_plain(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that are written for an entry of the state dict: several if it is a stack of biases."""
        names = self._biases.get(key, [key])
        return [(key, value)] if names == [key] else list(zip(names, _pieces(value, len(names)), strict=True))


def _pieces(value: Tensor, count: int) -> list[Tensor]:
    return [value] if count == 1 else list(value.unbind(0))


def renaming(rename: Rename) -> Callable[[str], str]:
    """``rename`` as a function."""
    if rename is None:
        return _unwrapped
    if isinstance(rename, Mapping):
        table = rename
        return lambda name: table.get(_unwrapped(name), _unwrapped(name))
    chosen = rename
    return lambda name: chosen(_unwrapped(name))


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_extra_state(key: str) -> bool:
    """Whether an entry belongs to the histories of delayed scaling, which no other program needs."""
    return "_extra_state" in key.split(".")


def _tied_keys(model: Any, config: Mapping[str, Any]) -> set[str]:
    """Keys that a Hugging Face model ties to others when it is loaded, so that files leave them out."""
    if not config.get("tie_word_embeddings"):
        return set()
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    found = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): key for key, parameter in model.named_parameters()}
    return {key for key in tied if key in found and first[id(found[key])] != key}


def _left(model: nn.Module, weights: list[ExportedWeight]) -> list[str]:
    """Paths of the linear and embedding layers, and of stacks of experts, that are not quantized."""
    quantized = {weight.path for weight in weights}
    kinds = (nn.Linear, nn.Embedding, LinearModule, LinearOperation, ConvertedConv1D)
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if path not in quantized
        and (isinstance(module, kinds) or is_conv1d(module) or any(p.dim() == 3 for p in module.parameters(False)))
    ]


# ---- config.json -----------------------------------------------------------------------------------------


def config_of(model: Any, config: ConfigChoice, dtype: torch.dtype | None) -> dict[str, Any]:
    """The configuration to write: the given one, or that of a Hugging Face model, or an empty one."""
    if config is None:
        own: Any = getattr(model, "config", None)
        found = json.loads(own.to_json_string()) if hasattr(own, "to_json_string") else {}
        if found and not found.get("architectures"):
            found["architectures"] = [type(model).__name__]
        found.pop("dtype", None)  # which need not be that of the tensors
    elif isinstance(config, Mapping):
        found = dict(config)
    else:
        found = read_json(Path(config))
    found.pop("quantization_config", None)
    if dtype is not None or (found and not found.get("dtype")):
        of_model = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        found["dtype"] = str(of_model if dtype is None else dtype).removeprefix("torch.")
    return found
