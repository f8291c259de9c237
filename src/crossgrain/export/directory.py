"""Write the directory of an export: complete or not there, with tensors in shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files.durable import make_directory, publish_directory, remove_directory, remove_remains, whole_directory
from ..files.manifest import DamagedFileError, read_manifest, write_manifest
from ..files.safetensors_file import safetensors_package

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST_KIND = "crossgrain export"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN = {"config.json", "hf_quant_config.json", "manifest.json", "manifest.sha256", "generation_config.json"}


@contextmanager
def new_export(path: Path, overwrite: bool, about: Mapping[str, Any]) -> Iterator[Path]:
    """Context manager that yields a directory to write to, which gets its name when the block ends.

    A directory cannot be replaced in one step: with ``overwrite``, the old one is removed just before the new one,
    which is complete then, gets its name.

    Raises:
        FileExistsError: there is something at ``path`` already, or ``overwrite`` would remove what is no export.
    """
    check_can_write(path, overwrite)
    make_directory(path.parent)
    remove_remains(path.parent)
    if not path.exists():
        with whole_directory(path) as directory:
            yield directory
            write_manifest(directory, {"kind": MANIFEST_KIND, **about})
        return
    staged = path.with_name(f"{path.name}.new")
    with whole_directory(staged) as directory:
        yield directory
        write_manifest(directory, {"kind": MANIFEST_KIND, **about})
    remove_directory(path)
    publish_directory(staged, path)


def check_can_write(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if something is at ``path`` that must not be replaced."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists already; choose another directory, or pass overwrite=True")
    own = path.is_dir() and not path.is_symlink() and (is_export(path) or not any(path.iterdir()))
    if not own:
        raise FileExistsError(
            f"{path} is not the directory of an export, so it is not removed. Remove it yourself, or choose another one"
        )
    if path.with_name(f"{path.name}.new").exists():
        raise FileExistsError(f"{path}.new exists already, where the new directory would be prepared; remove it first")


def is_export(path: Path) -> bool:
    """Whether a directory was written by an export. Training checkpoints have a manifest too, of another kind."""
    try:
        return read_manifest(path).get("kind") == MANIFEST_KIND
    except (FileNotFoundError, DamagedFileError):
        return False


def write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int, metadata: Mapping[str, dict[str, str]]
) -> list[str]:
    """Write tensors to safetensors files of at most ``max_bytes`` each, with an index if there are several.

    Args:
        directory: where to write.
        tensors: names and tensors, made one after the other, so that only one shard is in memory.
        max_bytes: size of the tensors of a file; a larger tensor has a file of its own.
        metadata: entries for the metadata of files, ``{key: {name: text}}``. It may grow while tensors are made; each
            file takes what is there when it is written.

    Returns:
        The names of the files.
    """
    shards: list[dict[str, int]] = []  # names and sizes
    shard: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal shard, size
        _write_shard(directory / f"shard-{len(shards)}", shard, metadata)
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard, size = {}, 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            flush()
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(directory / "shard-0", directory / SINGLE)
        return [SINGLE]
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        os.rename(directory / f"shard-{i}", directory / file)
    index = {
        "metadata": {"total_size": sum(sum(names.values()) for names in shards)},
        "weight_map": {name: file for names, file in zip(shards, files, strict=True) for name in names},
    }
    write_json(directory / INDEX, index)
    return files


def _write_shard(path: Path, shard: dict[str, Tensor], metadata: Mapping[str, dict[str, str]]) -> None:
    safetensors = safetensors_package()
    about = {"format": "pt"}
    for key, entries in metadata.items():
        if entries:
            about[key] = json.dumps(entries)
            entries.clear()
    try:
        safetensors.torch.save_file(shard, path, about)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file. NaN and infinity are refused, because other programs cannot read them."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def copy_assets(source: Path, directory: Path) -> list[str]:
    """Copy the files of a model's directory that are no weights: tokenizer, templates, licences.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"the directory {source} does not exist")
    copied = []
    for path in sorted(source.iterdir()):
        skipped = path.name in _OWN or path.name.startswith(".") or path.name.endswith(".index.json")
        if path.is_file() and path.suffix not in _WEIGHTS and not skipped:
            shutil.copyfile(path, directory / path.name)
            copied.append(path.name)
    return copied
