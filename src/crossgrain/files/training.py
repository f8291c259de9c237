"""Checkpoints of a training run: everything that is needed to go on bit for bit.

    save_checkpoint("run/checkpoints", step, model=model, optimizer=optimizer, scheduler=scheduler, recipe=recipe)
    done = load_checkpoint("run/checkpoints", model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(done.step + 1, ...): ...

A checkpoint is a directory ``step-00000042`` with a file for each object and a manifest of checksums. It
appears whole or not at all (see `durable`), and it is read only by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from ..recipe import Recipe
from ..recipe.portable import recipe_from_text
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from .bound import RecipeChoice, recipe_text
from .durable import whole_directory
from .loading import load_in_place
from .manifest import DamagedFileError, check_files, read_manifest, write_manifest
from .random_state import get_random_state, set_random_state
from .steps import checked_step, chosen_checkpoint, keep_newest, path_of_new_step
from .undo import all_or_nothing

_RANDOM, _EXTRAS = "random", "extras"
INIT_VALUES = "init_values_of_"  # followed by the name of a model


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded beside the states of the objects."""

    path: Path
    step: int
    recipe_text: str | None
    extras: dict[str, Any]

    def recipe(self, *, import_functions: bool = False) -> Recipe | None:
        """The recipe that was saved. ``import_functions``: see `recipe_from_text`."""
        if self.recipe_text is None:
            return None
        return recipe_from_text(self.recipe_text, import_functions=import_functions)


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    *,
    recipe: RecipeChoice = "bound",
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
    **objects: Any,
) -> Path:
    """Save ``objects`` (``model=``, ``optimizer=``, ...: whatever has a ``state_dict``) and the random states.

    ``recipe``  travels as text, by default the one that the model was converted with, None: none; a recipe whose
                functions have no name at module scope is refused
    ``extras``  plain data and tensors of your own
    ``keep``    how many checkpoints to keep, the newest; older ones are removed after this one is on the disk

    Steps in one directory go up: it is an error if a checkpoint of this step or a later one is there.
    """
    root, step = Path(root), checked_step(step)
    check_request(objects, keep)
    text = recipe_text(recipe, objects.values())
    contents = {**_contents(objects), _EXTRAS: dict(extras or {}), _RANDOM: get_random_state()}
    path = path_of_new_step(root, step)
    with whole_directory(path) as directory:
        for name, content in contents.items():
            _write(directory / f"{name}.pt", content)
        write_manifest(directory, {"step": step, "recipe": text, "objects": sorted(objects)})
    if keep is not None:
        keep_newest(root, keep)
    return path


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    random_state: bool = True,
    strict: bool = True,
    assign: bool = False,
    requantize: bool = False,
    **objects: Any,
) -> Checkpoint:
    """Load a checkpoint, or the latest of a directory of them, into ``objects``, named as they were saved.

    Everything is read and checked before anything changes; if an object refuses its state, all are put back
    as they were. What the checkpoint has beyond ``objects`` is left alone. ``strict``, ``assign`` and
    ``requantize`` are those of `load_state_dict` for modules, ``random_state=False`` leaves the random number
    generators as they are.
    """
    path = chosen_checkpoint(Path(path))
    manifest = manifest_of(path)
    if "shards" in manifest:
        raise ValueError(f"{path} was saved in shards: crossgrain.distributed.checkpoint.load reads it")
    missing = sorted(objects.keys() - set(manifest["objects"]))
    if missing:
        there = ", ".join(manifest["objects"]) or "nothing"
        raise ValueError(f"{path} has no {', '.join(missing)}; it has {there}")
    check_files(path, manifest)
    wanted = [*objects, *(f"{INIT_VALUES}{name}" for name in objects), _EXTRAS, _RANDOM]
    contents = {name: _read(path / f"{name}.pt") for name in wanted if f"{name}.pt" in manifest["files"]}
    with all_or_nothing(*objects.values()):
        # Optimizers look at parameters, so these come first.
        for name, value in sorted(objects.items(), key=lambda item: not isinstance(item[1], nn.Module)):
            if isinstance(value, nn.Module):
                load_in_place(value, contents[name], strict=strict, assign=assign, requantize=requantize)
                _preserve(value, contents.get(f"{INIT_VALUES}{name}", {}))
            else:
                value.load_state_dict(contents[name])
        if random_state:
            set_random_state(contents[_RANDOM])
    return Checkpoint(path, manifest["step"], manifest["recipe"], contents[_EXTRAS])


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise `DamagedFileError` if a checkpoint, or the latest of a directory of them, was cut off or changed."""
    path = chosen_checkpoint(Path(path))
    check_files(path, manifest_of(path))


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; one that lacks anything is refused before anything is loaded."""
    manifest = read_manifest(path)
    kinds: dict[str, Any] = {"step": int, "recipe": str | None, "objects": list, "files": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name, ...), kind)]
    if not wrong and "shards" not in manifest:
        needed = [f"{name}.pt" for name in (*manifest["objects"], _EXTRAS, _RANDOM)]
        wrong = [name for name in needed if name not in manifest["files"]]
    if wrong:
        raise DamagedFileError(f"{path}: the manifest does not tell {', '.join(wrong)}")
    return manifest


def check_request(objects: Mapping[str, Any], keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"keep is the number of checkpoints to keep, at least 1, not {keep}")
    for name, value in objects.items():
        if name in (_RANDOM, _EXTRAS) or name.startswith(INIT_VALUES):
            raise ValueError(f"{name!r} is a name that checkpoints use themselves")
        if not name or name != Path(name).name or name.startswith("."):
            raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise TypeError(f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict")


def _contents(objects: Mapping[str, Any]) -> dict[str, Any]:
    contents = {name: value.state_dict() for name, value in objects.items()}
    for name, value in objects.items():
        preserved = _preserved(value) if isinstance(value, nn.Module) else {}
        if preserved:
            contents[f"{INIT_VALUES}{name}"] = preserved
    return contents


def _preserved(model: nn.Module) -> dict[str, torch.Tensor]:
    """What masters will be made from, as long as there are none."""
    found = {
        name: preserved_value(param) for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)
    }
    return {name: value for name, value in found.items() if value is not None}


def _preserve(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        if name in values and isinstance(param, QuantizedTensor):
            keep_high_precision_init_val(param, values[name])


class _Writer:
    """A file for torch.save, which says nothing of the reason when it cannot write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        writer = _Writer(file)
        try:
            torch.save(content, writer)  # type: ignore[arg-type]
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise
    try:
        torch.load(path, weights_only=True, mmap=True)  # looks at the structure and leaves the numbers on the disk
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error)
        raise TypeError(
            f"{path.stem} cannot be saved: it holds something that is neither a tensor nor plain data, which could not "
            f"be loaded safely: {reason}"
        ) from error


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DamagedFileError(f"{path} cannot be loaded: {error}") from error
