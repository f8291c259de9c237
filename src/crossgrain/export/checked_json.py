"""Read JSON files that somebody else may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files.manifest import DamagedFileError

_LARGEST = 256 * 2**20  # bytes: the index of a model with a million tensors is smaller


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: it is not a JSON object, names a key twice, or has NaN or infinity, which JSON has not.
    """
    if not path.is_file():
        raise FileNotFoundError(f"the file {path} does not exist")
    if path.stat().st_size > _LARGEST:
        raise DamagedFileError(f"{path} is larger than any such file should be: {path.stat().st_size} bytes")
    try:
        content = json.loads(path.read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return found
