"""Save and load checkpoints of a training run, so that a resumed run continues bit for bit.

    save_checkpoint("run/checkpoints", step, model=model, optimizer=optimizer, scheduler=scheduler, recipe=recipe)
    done = load_checkpoint("run/checkpoints", model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(done.step + 1, ...): ...

A checkpoint is a directory ``step-00000042`` with one file per object and a manifest of checksums. It is written
atomically (see `durable`), and read with ``torch.load(weights_only=True)``, which runs no code from the file.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..convert import ScheduledConversion
from ..recipe import Recipe
from ..recipe.portable import recipe_from_text
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from .bound import RecipeChoice, recipe_text
from .durable import whole_directory
from .loading import load_in_place, load_into
from .manifest import DamagedFileError, check_files, is_file_name, read_manifest, write_manifest
from .random_state import get_random_state, set_random_state
from .steps import checked_step, chosen_checkpoint, keep_newest, path_of_new_step
from .undo import all_or_nothing

_RANDOM, _EXTRAS = "random", "extras"
INIT_VALUES = "init_values_of_"  # followed by the name of a model


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load_checkpoint`: what the checkpoint holds besides the states of the objects.

    Attributes:
        path: the directory that was read.
        step: the step it was saved at.
        recipe_text: the recipe as text, or None if none was saved.
        extras: what was passed to `save_checkpoint` as ``extras``.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = cg.files.save_checkpoint(root, 7, model=model, extras={"epoch": 2})
        ...     loaded = cg.files.load_checkpoint(root, model=model)
        >>> loaded.step, loaded.extras
        (7, {'epoch': 2})
    """

    path: Path
    step: int
    recipe_text: str | None
    extras: dict[str, Any]

    def recipe(self, *, import_functions: bool = False) -> Recipe | None:
        """Return the recipe that was saved, or None.

        Args:
            import_functions: allow importing the modules of functions that the recipe names, which runs their code.
                Set it only if you trust the file.
        """
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
    """Save a checkpoint of a training run to ``root/step-<step>``.

    The states of the random number generators of torch, Python and numpy are saved too.

    Args:
        root: directory of all checkpoints of the run; created if missing.
        step: number of the step, >= 0. It must be higher than the step of every checkpoint in ``root``.
        recipe: the recipe to store, as a recipe or its text. By default the recipe that the model was converted with;
            None stores none.
        extras: your own plain data and tensors; `load_checkpoint` returns them.
        keep: keep only this many newest checkpoints in ``root``. Older ones are removed after this one is on disk.
        **objects: what to save, by name: ``model=model, optimizer=optimizer``. Everything that has ``state_dict`` and
            ``load_state_dict`` can be saved.

    Returns:
        The directory of the new checkpoint.

    Raises:
        FileExistsError: ``root`` has a checkpoint of this step or a later one.
        TypeError: something cannot be saved so that it could be loaded safely.
        ValueError: ``step``, ``keep`` or a name is invalid, or the recipe uses a function that is not defined at module
            scope and so cannot be found again.
        OSError: the disk is full or not writable; no checkpoint is left behind.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = cg.files.save_checkpoint(root, 7, model=model)
        ...     path.name
        'step-00000007'
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
    """Load a checkpoint that `save_checkpoint` wrote.

    All files are read and checked before anything changes. If an object then refuses its state, all objects and the
    random number generators are restored to what they were before.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest is loaded.
        random_state: restore the states of the random number generators.
        strict: for modules, as in `load_state_dict`.
        assign: for modules, as in `load_state_dict`.
        requantize: for modules, as in `load_state_dict`.
        **objects: what to load into, by the names they were saved under. Saved objects that are not named here are
            ignored.

    Returns:
        The step, the recipe and the extras that were saved.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        DamagedFileError: a file of the checkpoint is missing, truncated or modified.
        ValueError: the checkpoint does not contain one of ``objects``, or was saved in shards.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = cg.files.save_checkpoint(root, 7, model=model)
        ...     loaded = cg.files.load_checkpoint(root, model=model)
        >>> loaded.step
        7
    """
    path = chosen_checkpoint(Path(path))
    manifest = manifest_of(path)
    if "shards" in manifest:
        raise ValueError(f"{path} was saved in shards; load it with crossgrain.distributed.checkpoint.load")
    missing = sorted(objects.keys() - set(manifest["objects"]))
    if missing:
        there = ", ".join(manifest["objects"]) or "nothing"
        raise ValueError(f"the checkpoint {path} has no {', '.join(missing)}; it has {there}")
    check_files(path, manifest)
    wanted = [*objects, *(f"{INIT_VALUES}{name}" for name in objects), _EXTRAS, _RANDOM]
    contents = {name: _read(path / f"{name}.pt") for name in wanted if f"{name}.pt" in manifest["files"]}
    with all_or_nothing(*objects.values()):
        for name, value in sorted(objects.items(), key=lambda item: loading_order(item[1])):
            if isinstance(value, nn.Module):
                load_in_place(value, contents[name], strict=strict, assign=assign, requantize=requantize)
                _preserve(value, contents.get(f"{INIT_VALUES}{name}", {}))
            else:
                load_into(name, value, contents[name])
        if random_state:
            set_random_state(contents[_RANDOM])
    return Checkpoint(path, manifest["step"], manifest["recipe"], contents[_EXTRAS])


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Check all files of a checkpoint against its manifest, without loading it.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest is checked.

    Raises:
        DamagedFileError: a file is missing, truncated or modified.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = cg.files.save_checkpoint(root, 7, model=model)
        ...     cg.files.verify_checkpoint(path)  # raises if a file is damaged
    """
    path = chosen_checkpoint(Path(path))
    check_files(path, manifest_of(path))


def manifest_of(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; raise `DamagedFileError` if it lacks a required entry."""
    manifest = read_manifest(path)
    kinds: dict[str, Any] = {"step": int, "recipe": str | None, "objects": list, "files": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name, ...), kind)]
    if not wrong and "shards" not in manifest:
        needed = [f"{name}.pt" for name in (*manifest["objects"], _EXTRAS, _RANDOM)]
        wrong = [name for name in needed if name not in manifest["files"]]
    if wrong:
        raise DamagedFileError(f"the manifest of {path} is incomplete: it lacks {', '.join(wrong)}")
    return manifest


def loading_order(value: Any) -> int:
    """The place in the order of loading: a schedule decides which layers have histories; optimizers need parameters."""
    return 0 if isinstance(value, ScheduledConversion) else 1 if isinstance(value, nn.Module) else 2


def check_request(objects: Mapping[str, Any], keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be the number of checkpoints to keep, at least 1, got {keep}")
    for name, value in objects.items():
        if name in (_RANDOM, _EXTRAS) or name.startswith(INIT_VALUES):
            raise ValueError(f"{name!r} is a name that checkpoints use internally; save the object under another name")
        if name.startswith(".") or not is_file_name(f"{INIT_VALUES}{name}.pt") or not name:
            raise ValueError(
                f"objects are saved under file names, and {name[:80]!r} cannot be the name of a file in a checkpoint"
            )
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise TypeError(
                f"{name} is a {type(value).__name__}; an object to save needs state_dict and load_state_dict"
            )


def _contents(objects: Mapping[str, Any]) -> dict[str, Any]:
    contents = {name: value.state_dict() for name, value in objects.items()}
    for name, value in objects.items():
        preserved = _preserved(value) if isinstance(value, nn.Module) else {}
        if preserved:
            contents[f"{INIT_VALUES}{name}"] = preserved
    return contents


def _preserved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The preserved high-precision initial values, from which an optimizer will make its master weights."""
    found = {
        name: preserved_value(param) for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)
    }
    return {name: value for name, value in found.items() if value is not None}


def _preserve(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        if name in values and isinstance(param, QuantizedTensor):
            keep_high_precision_init_val(param, values[name])


def _write(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        sink: Any = SimpleNamespace(write=file.write, flush=file.flush)
        try:
            torch.save(content, sink)
        except BaseException as error:
            # If it was interrupted, torch writes the end of the file when its own object is freed, perhaps much later,
            # and aborts the process if that raises. So from now on everything is accepted, and goes nowhere.
            sink.write = len
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch's own error does not say why a write failed
            raise
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")  # the numbers stay on the disk
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error)
        raise TypeError(
            f"{path.stem} cannot be saved: it contains something that is neither a tensor nor plain data, so it could "
            f"not be loaded safely: {reason}"
        ) from error


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a file that somebody has changed can make torch raise anything
        raise DamagedFileError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
