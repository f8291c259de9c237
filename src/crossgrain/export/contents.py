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

from ..files.safetensors_file import cast_tensor
from ..recipe import GemmRecipe, Recipe, as_recipe
from ..recipe.extra_state import is_extra_state_key
from ..tensor import QuantizedTensor
from .checked_json import read_json
from .hub_names import Piece, hub_names
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
        left: names of modules with matrices that stay in high precision: linear layers, embeddings, routers, experts.
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
    model: nn.Module,
    recipe: Recipe | None,
    dtype: torch.dtype | None,
    config: ConfigChoice,
    rename: Rename,
    *,
    names_of_files: bool = True,
) -> Contents:
    """Collect what is exported of a model. Nothing is quantized yet.

    Args:
        model: the model.
        recipe: the recipe of layers that are bound to none.
        dtype: see `Contents`.
        config: the configuration of the user.
        rename: the names of the user.
        names_of_files: use the names of Hugging Face's files for models of transformers.

    Raises:
        ValueError: two tensors would get the same name, a name is reserved, or a weight cannot be exported.
    """
    renamed = renaming(rename)
    _refuse_adapters(model)
    weights = quantized_weights(model, recipe)
    names = Names(weights, hub_names(model) if names_of_files else {})
    found = Contents({}, {}, [], config_of(model, config, dtype), dtype, renamed=renamed)
    for weight in weights:
        for own in names.of_weight(weight):
            _add(found.weights, renamed(own.name), own, found)
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
        if key in quantized_keys or key in tied or not isinstance(value, Tensor) or is_extra_state_key(key):
            continue
        if value.is_meta:
            raise ValueError(f"{key} is on the meta device, so it has no values to export")
        for name, tensor in names.of_plain(key, value):
            _add(found.plain, renamed(name), tensor, found)
    left = [name for path in _left(model, weights) for name in names.of_layer(path)]
    found.left = [renamed(f"{name}{_WEIGHT}").removesuffix(_WEIGHT) for name in dict.fromkeys(left)]
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
    """Names in files: of weights and plain tensors, and of the layers that have them.

    Biases of layers whose weights are renamed are renamed likewise.
    """

    def __init__(self, weights: list[ExportedWeight], pieces: Mapping[str, list[Piece]]) -> None:
        self._pieces = pieces
        self._biases: dict[str, list[str]] = {}
        for weight in weights:
            prefix = f"{weight.path}." if weight.path else ""
            for parameter, names in bias_names(weight.module).items():
                self._biases[f"{prefix}{parameter}"] = [f"{prefix}{name}" for name in names]

    def of_plain(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that are written for an entry of the state dict: several if it is a stack."""
        if key in self._pieces:
            return [(piece.name, piece.of(value)) for piece in self._pieces[key]]
        names = self._biases.get(key, [key])
        return [(key, value)] if names == [key] else list(zip(names, _pieces(value, len(names)), strict=True))

    def of_weight(self, weight: ExportedWeight) -> list[ExportedWeight]:
        """A weight under its names: several if files have its rows in several tensors."""
        part, rows = weight.part, weight.shape[0]
        pieces = [piece for piece in self._pieces.get(weight.key, []) if piece.place == part.place]
        if part.place is None and len(pieces) == 1:
            return [weight.piece(pieces[0].name, 0, rows)]
        begin = part.start if part.place is not None else 0
        inside = [piece for piece in pieces if begin <= piece.start and piece.stop <= begin + rows]
        if part.transposed or sum(piece.stop - piece.start for piece in inside) != rows:
            return [weight]
        return [weight.piece(piece.name, piece.start - begin, piece.stop - begin) for piece in inside]

    def of_layer(self, path: str) -> list[str]:
        """The names of a layer: that in the model, and those of its pieces in files."""
        own = [piece.name for key, pieces in self._pieces.items() if key.rpartition(".")[0] == path for piece in pieces]
        return [path, *(name.removesuffix(_WEIGHT) for name in own if name.endswith(_WEIGHT))]


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


def _tied_keys(model: Any, config: Mapping[str, Any]) -> set[str]:
    """Keys that a Hugging Face model ties to others when it is loaded, so that files leave them out."""
    if not config.get("tie_word_embeddings"):
        return set()
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    found = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): key for key, parameter in model.named_parameters()}
    return {key for key in tied if key in found and first[id(found[key])] != key}


def _left(model: nn.Module, weights: list[ExportedWeight]) -> list[str]:
    """Paths of modules with matrices that are not quantized: linear layers, embeddings, routers, stacks of experts.

    Engines may have a linear layer where the model has something else.
    """
    quantized = {weight.path for weight in weights}
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if path and path not in quantized and any(p.dim() in (2, 3) for p in module.parameters(recurse=False))
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
