"""Read the directory of an exported model. Nothing in it is trusted: it may come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.manifest import DamagedFileError, check_files, is_described, is_file_name, read_manifest
from ..files.safetensors_file import safetensors_package
from .checked_json import read_json
from .directory import INDEX, SINGLE
from .gguf import FILE as GGUF_FILE
from .gguf import gguf_package
from .layout import AMAX


class StoredTensors:
    """The tensors of a directory by name; each is read when it is asked for.

    Args:
        directory: the directory.
        verify: compare all files with the checksums in the manifest, if there is one.

    Raises:
        FileNotFoundError: there is no model in the directory.
        DamagedFileError: a file is missing, truncated, modified or inconsistent.

    Attributes:
        config: the contents of ``config.json``; empty if there is none.
        amaxes: exact amaxes of NVFP4 tensors that the files tell, by name.
    """

    def __init__(self, directory: Path, *, verify: bool) -> None:
        if not directory.is_dir():
            raise FileNotFoundError(f"the directory {directory} does not exist")
        if verify and is_described(directory):
            check_files(directory, read_manifest(directory))
        self.directory = directory
        path = directory / "config.json"
        self.config: dict[str, Any] = read_json(path) if path.is_file() else {}
        if not isinstance(self.config.get("quantization_config", {}), dict):
            raise DamagedFileError(f"{path}: quantization_config must be an object")
        self.amaxes: dict[str, float] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._gguf: dict[str, Tensor] = {}
        if (directory / GGUF_FILE).is_file():
            self._open_gguf(directory / GGUF_FILE)
        else:
            self._open_shards()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self._files, *self._gguf}

    def get(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors.

        Raises:
            DamagedFileError: a tensor is missing, or its file is damaged.
        """
        found = {}
        for name in names:
            if name in self._gguf:
                found[name] = self._gguf[name]
                continue
            if name not in self._files:
                raise DamagedFileError(f"{self.directory} has no tensor {name}")
            safetensors, path = safetensors_package(), self._files[name]
            try:
                if path not in self._open:
                    self._open[path] = safetensors.safe_open(path, framework="pt")
                found[name] = self._open[path].get_tensor(name)
            except (safetensors.SafetensorError, OSError, ValueError) as error:
                raise DamagedFileError(f"{path} is damaged: {name} cannot be read: {error}") from error
        return found

    # ---- safetensors ---------------------------------------------------------------------------

    def _open_shards(self) -> None:
        index = self.directory / INDEX
        if not index.is_file():
            if not (self.directory / SINGLE).is_file():
                raise FileNotFoundError(f"{self.directory} holds no model: there is neither {SINGLE} nor {INDEX}")
            self._files = dict.fromkeys(self._header(self.directory / SINGLE), self.directory / SINGLE)
            return
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
            raise DamagedFileError(f"{index} has no weight_map that says in which file each tensor is")
        shards = sorted(set(placed.values()))
        for file in shards:
            if not is_file_name(file) or not file.endswith(".safetensors"):
                raise DamagedFileError(f"{index} names {file[:80]!r}, which cannot be a file of this directory")
            if not (self.directory / file).is_file():
                raise DamagedFileError(f"the shard {file} is missing, but {index} says that it holds tensors")
        there = {file: self._header(self.directory / file) for file in shards}
        for name, file in placed.items():
            if name not in there[file]:
                raise DamagedFileError(f"{index} says that {name[:200]!r} is in {file}, but it is not")
        unlisted = [name for file, names in there.items() for name in names if placed.get(name) != file]
        if unlisted:
            raise DamagedFileError(
                f"{index} does not list {unlisted[0][:200]!r} where it is, so it may be of another model"
            )
        self._files = {name: self.directory / file for name, file in placed.items()}

    def _header(self, path: Path) -> set[str]:
        """The names of the tensors in a file."""
        safetensors = safetensors_package()
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                self._take_amaxes(path, (file.metadata() or {}).get(AMAX))
                return set(file.keys())
        except (safetensors.SafetensorError, OSError) as error:
            raise DamagedFileError(f"{path} is truncated or not a safetensors file: {error}") from error

    def _take_amaxes(self, path: Path, text: str | None) -> None:
        if text is None:
            return
        try:
            given: Mapping[str, str] = json.loads(text)
            amaxes = {name: float.fromhex(number) for name, number in given.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedFileError(f"{path}: its metadata {AMAX} is not readable: {error}") from error
        if not all(math.isfinite(amax) and amax >= 0 for amax in amaxes.values()):
            raise DamagedFileError(f"{path}: its metadata {AMAX} has an amax that is not a number of at least 0")
        self.amaxes.update(amaxes)

    # ---- GGUF ----------------------------------------------------------------------------------

    def _open_gguf(self, path: Path) -> None:
        gguf = gguf_package()
        try:
            reader = gguf.GGUFReader(path)
            about = reader.fields.get(AMAX)
            self._take_amaxes(path, None if about is None else str(about.contents()))
            for tensor in reader.tensors:
                if tensor.name in self._gguf:
                    raise DamagedFileError(f"{path} has two tensors called {tensor.name[:200]!r}")
                self._gguf[tensor.name] = _from_gguf(tensor, gguf)
        except DamagedFileError:
            raise
        except Exception as error:  # the reader does not check what it reads
            raise DamagedFileError(
                f"{path} is truncated or not a GGUF file: {type(error).__name__}: {error}"
            ) from error


def _from_gguf(tensor: Any, gguf: Any) -> Tensor:
    """A tensor of a GGUF file: numbers as they are, blocks as bytes."""
    data = torch.from_numpy(tensor.data.copy())
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return data.contiguous().view(torch.bfloat16)
    return data
