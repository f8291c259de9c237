"""Recipes in YAML and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

SUFFIXES = (".yaml", ".yml", ".json")


def is_recipe_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether this names a file of a recipe, by its type or by its suffix."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip().endswith(SUFFIXES))


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file holds; ValueError if that is not a mapping."""
    path = _checked(path)
    try:
        content = _parsed(path, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a recipe") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {type(content).__name__}; a recipe is a mapping, like 'fprop: mxfp8'")
    return dict(content)


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    yaml = _yaml(path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML (a pattern that begins with * has to be quoted): {error}") from None


def write_mapping(mapping: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """In the format that the suffix says."""
    path = _checked(path)
    if path.suffix == ".json":
        text = json.dumps(mapping, indent=2) + "\n"
    else:
        text = _yaml(path).safe_dump(dict(mapping), sort_keys=False, width=120)
    path.write_text(text, encoding="utf-8")


def _checked(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a recipe is kept in a file that ends with {', '.join(SUFFIXES)}")
    return path


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is there twice")
        result[key] = value
    return result


def _yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError(f"{path}: YAML needs pyyaml (pip install 'crossgrain[yaml]'); JSON works without") from None
    return yaml
