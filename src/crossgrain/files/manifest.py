"""Write and check ``manifest.json``, which lists the size and SHA-256 checksum of every file of a checkpoint.

The checksum of the manifest itself is in ``manifest.sha256``, in the form that ``sha256sum --check`` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME, _SEAL = "manifest.json", "manifest.sha256"
_LONGEST_NAME = 255  # bytes of a file name that every usual file system takes
VERSION = 1


class DamagedFileError(ValueError):
    """A file is truncated, was modified, or does not contain what its description says."""


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of all files in ``directory``; ``content`` is plain data that is stored in it too."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": digest_of(path)} for path in sorted(directory.iterdir())
    }
    text = json.dumps({"version": VERSION, **content, "files": files}, indent=2, sort_keys=True)
    (directory / _NAME).write_text(text, encoding="utf-8")
    (directory / _SEAL).write_text(f"{digest_of(directory / _NAME)}  {_NAME}\n", encoding="utf-8")


def is_described(directory: Path) -> bool:
    """Whether the directory has a manifest."""
    return (directory / _NAME).is_file()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint. The files it lists are not checked here: see `check_files`.

    Raises:
        FileNotFoundError: there is no manifest.
        DamagedFileError: the manifest is damaged, or of an unknown version.
    """
    path = directory / _NAME
    if not is_described(directory):
        raise FileNotFoundError(f"{directory} is not a checkpoint: it has no {_NAME}")
    if not (directory / _SEAL).is_file() or (directory / _SEAL).read_bytes()[:64] != digest_of(path).encode():
        raise DamagedFileError(f"{path} is damaged: its checksum differs from the one in {_SEAL}")
    try:
        content: dict[str, Any] = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not a manifest of a checkpoint: {error}") from error
    if content.get("version") != VERSION:
        raise DamagedFileError(
            f"{path} has the unknown version {content.get('version')!r}; this crossgrain reads version {VERSION}"
        )
    if content.get("files") is not None:
        _check_list(path, content["files"])
    return content


def _check_list(path: Path, files: Any) -> None:
    """Raise unless ``files`` lists files of this directory, with what is to be known of each."""
    if not isinstance(files, dict):
        raise DamagedFileError(f"{path} has no list of files, but {type(files).__name__}")
    for name, about in files.items():
        if not is_file_name(name):
            raise DamagedFileError(f"{path} lists {name[:80]!r}, which cannot be the name of a file beside it")
        if not isinstance(about, dict) or not {"size", "sha256"} <= about.keys():
            raise DamagedFileError(f"{path} does not say the size and the checksum of {name!r}")


def is_file_name(name: str) -> bool:
    """Whether every usual file system takes ``name`` for a file of a directory."""
    return 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME and name == Path(name).name and "\0" not in name


def check_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `DamagedFileError` if a file is missing, truncated or modified."""
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise DamagedFileError(f"{path} is missing, but the manifest lists it")
        size = path.stat().st_size
        if size != expected["size"]:
            raise DamagedFileError(f"{path} is damaged: it has {size} bytes instead of {expected['size']}")
        if digest_of(path) != expected["sha256"]:
            raise DamagedFileError(f"{path} is damaged: its checksum differs from the one in the manifest")


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
