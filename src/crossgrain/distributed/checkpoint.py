"""Save and load checkpoints of sharded training, with torch.distributed.checkpoint.

A checkpoint that was saved by some number of ranks can be loaded by any other number:

    checkpoint.save("run", step, model=model, optimizer=optimizer)
    pending = checkpoint.async_save("run", step, model=model, optimizer=optimizer)
    done = checkpoint.load("run", model=model, optimizer=optimizer)

Programs that call torch.distributed.checkpoint themselves use `ModelState` and `OptimizerState`.

Every rank must call these functions. A checkpoint is a directory ``step-00000042`` in torch's own layout, with a
manifest of checksums. An interrupted save never leaves an incomplete checkpoint under its final name.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from ..files.bound import RecipeChoice, recipe_text
from ..files.description import dtype_from
from ..files.durable import new_directory_beside, publish_directory
from ..files.loading import load_into
from ..files.manifest import DamagedFileError, check_files, write_manifest
from ..files.steps import checked_step, chosen_checkpoint, keep_newest, path_of_new_step
from ..files.training import INIT_VALUES, Checkpoint, check_request, loading_order, manifest_of
from ..files.undo import all_or_nothing
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from ..tensor.sharding import local_part, sharded_like
from .agreement import check_agreement, on_first_rank, raise_together
from .random_states import RANDOM, expect_random_state, take_random_state
from .state_layout import layout_of, plain_layout, shards_stand_alone
from .state_tree import Tensors, put_together, taken_apart
from .stateful import ModelState, OptimizerState

__all__ = ["ModelState", "OptimizerState", "PendingCheckpoint", "async_save", "load", "save"]

_EXTRAS = "extras"


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    recipe: RecipeChoice = "bound",
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
    **objects: Any,
) -> Path:
    """Save a checkpoint; every rank writes its own shards. Returns when the checkpoint is complete.

    Every rank must call this with the same arguments. Each rank's random states are saved too.

    Args:
        root: directory of all checkpoints of the run, on a file system that all ranks share.
        step: number of the step, >= 0. It must be higher than the step of every checkpoint in ``root``.
        recipe: the recipe to store, as a recipe or its text. By default the recipe that the model was converted with;
            None stores none.
        extras: your own plain data and tensors; `load` returns them.
        keep: keep only this many newest checkpoints in ``root``.
        **objects: what to save, by name: ``model=model, optimizer=optimizer``. Everything that has ``state_dict`` and
            ``load_state_dict`` can be saved.

    Returns:
        The directory of the new checkpoint.

    Raises:
        FileExistsError: ``root`` has a checkpoint of this step or a later one.
        TypeError, ValueError: something cannot be saved, or ranks hold different values of the same tensor.
        OSError: writing failed; no checkpoint is left behind.
    """
    tensors, writer = _prepared(root, step, recipe, extras, keep, objects)
    with _clear_errors(writer):
        save_shards(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.destination


class PendingCheckpoint:
    """A checkpoint that is being written in the background; see `async_save`."""

    def __init__(self, future: Any, writer: _Writer, group: Any) -> None:
        self._future, self._writer, self._group = future, writer, group

    def done(self) -> bool:
        """Whether writing has ended, so that `wait` would return at once."""
        return bool(self._future.done())

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its directory, or raise the error. Every rank must call it."""
        try:
            with _clear_errors(self._writer):
                self._future.result()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None
        return self._writer.destination


def async_save(
    root: str | os.PathLike[str],
    step: int,
    *,
    recipe: RecipeChoice = "bound",
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
    **objects: Any,
) -> PendingCheckpoint:
    """Like `save`, but only copies all states and returns; they are written in the background.

    Training may continue at once. Call ``wait()`` on the result, on every rank, before the next save.

    Args:
        root: as in `save`.
        step: as in `save`.
        recipe: as in `save`.
        extras: as in `save`.
        keep: as in `save`.
        **objects: as in `save`.
    """
    tensors, writer = _prepared(root, step, recipe, extras, keep, objects)
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # training goes on using the others
    future = async_save_shards(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    return PendingCheckpoint(future, writer, group)


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    random_state: bool | None = None,
    **objects: Any,
) -> Checkpoint:
    """Load a checkpoint that `save` or `async_save` wrote, on any number of ranks. Every rank must call it.

    Everything is read and checked before anything changes. Quantized parameters must have the formats that were saved.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest is loaded.
        strict: for modules, as in ``torch.nn.Module.load_state_dict``.
        verify: compare checksums, for which the first rank reads all files.
        random_state: restore the random number generators of each rank, which needs as many ranks as saved the
            checkpoint. None restores them if the number of ranks is the same.
        **objects: what to load into, by the names they were saved under.

    Returns:
        The step, the recipe and the extras that were saved.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        DamagedFileError: a file of the checkpoint is missing, truncated or modified.
        ValueError: the checkpoint does not fit the objects; the message names the tensors.
    """
    found, manifest = on_first_rank(lambda: _checked(Path(path), verify, objects))
    tensors: Tensors = {}
    problems: list[str] = []
    with _described_by(found):
        finishes = {
            name: put_together(plain, (name,), tensors, _layout_of(name, objects), problems)
            for name, plain in manifest["shards"].items()
            if name.removeprefix(INIT_VALUES) in objects or name == _EXTRAS
        }
    raise_together(
        ValueError(f"the checkpoint {found} does not fit the model: {'; '.join(problems)}") if problems else None
    )
    set_random_state = expect_random_state(manifest, random_state, tensors)
    with _clear_errors(None):
        load_shards(tensors, storage_reader=FileSystemReader(found), no_dist=not dist.is_initialized())
    states = {name: finish() for name, finish in finishes.items()}
    with all_or_nothing(*objects.values()):
        for name, value in sorted(objects.items(), key=lambda item: loading_order(item[1])):
            if isinstance(value, nn.Module):
                shards_stand_alone(value)
                value.load_state_dict(states[name], strict=strict)
            else:
                load_into(name, value, states[name])
        set_random_state()
    for name, value in objects.items():
        preserved = states.get(f"{INIT_VALUES}{name}", {})
        for path, param in value.named_parameters() if preserved else ():
            if path in preserved:
                keep_high_precision_init_val(local_part(param), local_part(preserved[path]))
    return Checkpoint(found, manifest["step"], manifest["recipe"], states[_EXTRAS])


# ---- saving ----------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes to a temporary directory. When all ranks have written, the first rank renames it to its final name."""

    def __init__(self, temporary: Path, destination: Path, content: Mapping[str, Any], keep: int | None) -> None:
        super().__init__(temporary)
        self.temporary, self.destination = temporary, destination
        self._content, self._keep = content, keep

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        write_manifest(self.temporary, self._content)
        publish_directory(self.temporary, self.destination)
        if self._keep is not None:
            keep_newest(self.destination.parent, self._keep)


@torch.no_grad()
def _prepared(
    root: str | os.PathLike[str],
    step: int,
    recipe: RecipeChoice,
    extras: Mapping[str, Any] | None,
    keep: int | None,
    objects: Mapping[str, Any],
) -> tuple[Tensors, _Writer]:
    """The tensors to write, checked on all ranks, and the writer."""
    tensors: Tensors = {}
    problem, content = None, {}
    try:
        content = _described(step, recipe, extras, keep, objects, tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    raise_together(problem)
    content[RANDOM] = take_random_state(tensors)
    check_agreement(tensors, content)
    temporary, destination = on_first_rank(lambda: _begun(Path(root), content["step"]))
    return tensors, _Writer(temporary, destination, content, keep)


def _described(
    step: int,
    recipe: RecipeChoice,
    extras: Mapping[str, Any] | None,
    keep: int | None,
    objects: Mapping[str, Any],
    tensors: Tensors,
) -> dict[str, Any]:
    """Return the contents of the manifest, and add all tensors to ``tensors``."""
    check_request(objects, keep)
    step = checked_step(step)
    text = recipe_text(recipe, objects.values())
    states = {**{name: value.state_dict() for name, value in objects.items()}, _EXTRAS: dict(extras or {})}
    states |= {f"{INIT_VALUES}{name}": kept for name, value in objects.items() if (kept := _preserved(value))}
    shards = {name: taken_apart(state, (name,), tensors) for name, state in states.items()}
    return {"step": step, "recipe": text, "objects": sorted(objects), "shards": shards}


def _preserved(value: Any) -> dict[str, Tensor]:
    """Preserved initial values, from which master weights will be made, sharded like their parameters."""
    parameters = value.named_parameters() if isinstance(value, nn.Module) else ()
    quantized = {name: param for name, param in parameters if isinstance(local_part(param), QuantizedTensor)}
    found = {name: preserved_value(param) for name, param in quantized.items()}
    return {name: sharded_like(kept, quantized[name]) for name, kept in found.items() if kept is not None}


def _begun(root: Path, step: int) -> tuple[Path, Path]:
    destination = path_of_new_step(root, step)
    return new_directory_beside(destination), destination


# ---- loading ---------------------------------------------------------------------------------------------


def _checked(path: Path, verify: bool, objects: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    path = chosen_checkpoint(path)
    manifest = manifest_of(path)
    if "shards" not in manifest:
        raise ValueError(f"{path} was not saved in shards; load it with crossgrain.files.load_checkpoint")
    missing = sorted(objects.keys() - set(manifest["objects"]))
    if missing:
        there = ", ".join(manifest["objects"]) or "nothing"
        raise ValueError(f"the checkpoint {path} has no {', '.join(missing)}; it has {there}")
    if verify:
        check_files(path, manifest)
    with _described_by(path):
        absent = {*manifest["objects"], _EXTRAS} - manifest["shards"].keys()
        if absent:
            raise ValueError(f"it says nothing about {', '.join(sorted(absent))}")
        _check_sizes(manifest["shards"], sum(file.stat().st_size for file in path.iterdir()))
    return path, manifest


@contextmanager
def _described_by(path: Path) -> Iterator[None]:
    """Turn errors about what the manifest says into one that names the checkpoint: it may say anything."""
    try:
        yield
    except Exception as error:
        raise DamagedFileError(
            f"the manifest of {path} does not describe a checkpoint: {type(error).__name__}: {error}"
        ) from error


def _check_sizes(plain: Any, most: int) -> None:
    """Raise if a tensor is said to be larger than all files together: memory is allocated before they are read."""
    if isinstance(plain, list):
        for each in plain:
            _check_sizes(each, most)
    elif isinstance(plain, dict):
        if "tensor" in plain and math.prod(plain["tensor"]) * dtype_from(plain["dtype"]).itemsize > most:
            raise ValueError(f"a tensor of shape {plain['tensor']} does not fit into files of {most} bytes")
        for each in plain.values():
            _check_sizes(each, most)


def _layout_of(name: str, objects: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], Any]:
    """A function from the path of a tensor in a state to a tensor that shows the layout to load it in."""
    value = objects.get(name.removeprefix(INIT_VALUES))
    if name.startswith(INIT_VALUES):
        parameters = dict(value.named_parameters()) if isinstance(value, nn.Module) else {}
        return lambda path: plain_layout(parameters.get(path[1])) if len(path) == 2 else None
    return layout_of(value)


@contextmanager
def _clear_errors(writer: _Writer | None) -> Iterator[None]:
    """Turn torch's exception with the errors of all ranks into the first of them, and remove unfinished files."""
    try:
        yield
    except CheckpointException as failed:
        if writer is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            shutil.rmtree(writer.temporary, ignore_errors=True)
        rank, (error, _) = next(iter(failed.failures.items()))
        kind = OSError if isinstance(error, OSError) else RuntimeError
        raise kind(f"rank {rank}: {type(error).__name__}: {error}") from failed
