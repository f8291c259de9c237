"""Checkpoints of sharded training, with torch.distributed.checkpoint: saved on some ranks, loaded on any other number.

    checkpoint.save("run", step, model=model, optimizer=optimizer)
    pending = checkpoint.async_save("run", step, model=model, optimizer=optimizer)
    done = checkpoint.load("run", model=model, optimizer=optimizer)

Every rank calls these. A checkpoint is a directory ``step-00000042`` as torch writes it, with a manifest; it appears
whole or not at all.
"""

from __future__ import annotations

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
from ..files.durable import publish_directory, temporary_beside
from ..files.manifest import check_files, write_manifest
from ..files.steps import checked_step, chosen_checkpoint, keep_newest, path_of_new_step
from ..files.training import INIT_VALUES, Checkpoint, check_request, manifest_of
from ..files.undo import all_or_nothing
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from ..tensor.sharding import is_sharded, local_part, sharded_like
from .agreement import check_agreement, on_first_rank, raise_together
from .random_states import RANDOM, expect_random_state, take_random_state
from .state_tree import Tensors, put_together, taken_apart

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
    """Save ``objects`` (``model=``, ``optimizer=``, ...: whatever has a ``state_dict``); options as in
    `crossgrain.files.save_checkpoint`. Returns when the checkpoint is there."""
    tensors, writer = _prepared(root, step, recipe, extras, keep, objects)
    with _clear_errors(writer):
        save_shards(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.destination


class PendingCheckpoint:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, future: Any, writer: _Writer, group: Any) -> None:
        self._future, self._writer, self._group = future, writer, group

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._future.done())

    def wait(self) -> Path:
        """Return when the checkpoint is there, or raise what went wrong. Every rank has to call it."""
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
    """`save` that copies all states, returns, and writes them in the background: training may go on at once."""
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
    """Load a checkpoint, or the latest of a directory of them, into ``objects``, on any number of ranks.

    Everything is read and checked before anything changes. Quantized parameters have to be of the formats that were
    saved. ``verify=False`` does not compare checksums, for which the first rank reads all files. ``random_state``: each
    rank's random number generators go on as they would have; None: if there are as many ranks as there were.
    """
    found, manifest = on_first_rank(lambda: _checked(Path(path), verify, objects))
    tensors: Tensors = {}
    problems: list[str] = []
    finishes = {
        name: put_together(plain, (name,), tensors, _layout_of(name, objects), problems)
        for name, plain in manifest["shards"].items()
        if name.removeprefix(INIT_VALUES) in objects or name == _EXTRAS
    }
    raise_together(ValueError(f"{found} does not fit: {'; '.join(problems)}") if problems else None)
    set_random_state = expect_random_state(manifest, random_state, tensors)
    with _clear_errors(None):
        load_shards(tensors, storage_reader=FileSystemReader(found), no_dist=not dist.is_initialized())
    states = {name: finish() for name, finish in finishes.items()}
    with all_or_nothing(*objects.values()):
        # Optimizers look at parameters, so these come first.
        for name, value in sorted(objects.items(), key=lambda item: not isinstance(item[1], nn.Module)):
            if isinstance(value, nn.Module):
                _shards_stand_alone(value)
                value.load_state_dict(states[name], strict=strict)
            else:
                value.load_state_dict(states[name])
        set_random_state()
    for name, value in objects.items():
        preserved = states.get(f"{INIT_VALUES}{name}", {})
        for path, param in value.named_parameters() if preserved else ():
            if path in preserved:
                keep_high_precision_init_val(local_part(param), local_part(preserved[path]))
    return Checkpoint(found, manifest["step"], manifest["recipe"], states[_EXTRAS])


# ---- saving ----------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes under a temporary name. The first rank finishes when all have written, and gives the directory its own."""

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
    """What will be written, checked on all ranks, and who writes it."""
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
    """The content of the manifest; all tensors are added to ``tensors``."""
    check_request(objects, keep)
    step = checked_step(step)
    text = recipe_text(recipe, objects.values())
    states = {**{name: value.state_dict() for name, value in objects.items()}, _EXTRAS: dict(extras or {})}
    states |= {f"{INIT_VALUES}{name}": kept for name, value in objects.items() if (kept := _preserved(value))}
    shards = {name: taken_apart(state, (name,), tensors) for name, state in states.items()}
    return {"step": step, "recipe": text, "objects": sorted(objects), "shards": shards}


def _preserved(value: Any) -> dict[str, Tensor]:
    """Initial values that masters are still to be made from, sharded like their parameters."""
    parameters = value.named_parameters() if isinstance(value, nn.Module) else ()
    quantized = {name: param for name, param in parameters if isinstance(local_part(param), QuantizedTensor)}
    found = {name: preserved_value(param) for name, param in quantized.items()}
    return {name: sharded_like(kept, quantized[name]) for name, kept in found.items() if kept is not None}


def _begun(root: Path, step: int) -> tuple[Path, Path]:
    destination = path_of_new_step(root, step)
    temporary = temporary_beside(destination)
    temporary.mkdir()
    return temporary, destination


# ---- loading ---------------------------------------------------------------------------------------------


def _checked(path: Path, verify: bool, objects: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    path = chosen_checkpoint(path)
    manifest = manifest_of(path)
    if "shards" not in manifest:
        raise ValueError(f"{path} was not saved in shards: crossgrain.files.load_checkpoint reads it")
    missing = sorted(objects.keys() - set(manifest["objects"]))
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it has {', '.join(manifest['objects']) or 'nothing'}")
    if verify:
        check_files(path, manifest)
    return path, manifest


def _layout_of(name: str, objects: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Tensors of an object, by the path of a tensor in its state, that have the layout it is to be loaded in."""
    value = objects.get(name.removeprefix(INIT_VALUES))
    if name.startswith(INIT_VALUES):
        parameters = dict(value.named_parameters()) if isinstance(value, nn.Module) else {}
        return lambda path: _plain_layout(parameters.get(path[1])) if len(path) == 2 else None
    if isinstance(value, nn.Module):
        state = value.state_dict()
        return lambda path: state.get(path[1]) if len(path) == 2 else None
    if isinstance(value, torch.optim.Optimizer):
        params = dict(enumerate(param for group in value.param_groups for param in group["params"]))
        return lambda path: _plain_layout(params.get(path[2])) if path[1] == "state" else None
    return lambda path: None


def _plain_layout(param: Any) -> Any:
    """A plain tensor that is sharded like a parameter: states of quantized ones are not quantized."""
    if param is None or not isinstance(local_part(param), QuantizedTensor):
        return param
    return torch.zeros_like(param)


def _shards_stand_alone(model: nn.Module) -> None:
    """Shards that were cut from a whole do not share its scales any more: those of the checkpoint replace them."""
    for param in model.parameters():
        if is_sharded(param) and isinstance(local_part(param), QuantizedTensor):
            local_part(param)._stand_alone()


@contextmanager
def _clear_errors(writer: _Writer | None) -> Iterator[None]:
    """Torch raises a BaseException with the errors of all ranks: raise the first. Nothing is left half written."""
    try:
        yield
    except CheckpointException as failed:
        if writer is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            shutil.rmtree(writer.temporary, ignore_errors=True)
        rank, (error, _) = next(iter(failed.failures.items()))
        kind = OSError if isinstance(error, OSError) else RuntimeError
        raise kind(f"rank {rank}: {type(error).__name__}: {error}") from failed
