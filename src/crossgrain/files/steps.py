"""A directory of checkpoints: ``step-00000042`` and so on, each whole or not there."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path
from typing import Any

from .durable import make_directory, remove_directory, remove_remains
from .manifest import is_described

_PREFIX = "step-"
_NAME = re.compile(f"{_PREFIX}[0-9]+")


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step, if there is any."""
    found = _complete(Path(root))
    return found[-1] if found else None


def path_of_new_step(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` will be. Remains of killed processes are cleared away; steps have to go up."""
    make_directory(root)
    remove_remains(root)
    latest = latest_checkpoint(root)
    if latest is not None and _step_of(latest) >= step:
        raise FileExistsError(
            f"{root} has a checkpoint of step {_step_of(latest)} already, so step {step} cannot be saved there: go on "
            "from that one, remove it, or save to another directory"
        )
    return root / f"{_PREFIX}{step:08d}"


def checked_step(step: Any) -> int:
    """Any kind of integer, but only those that can be found again."""
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step is an integer, not {step!r}") from None
    if number < 0:
        raise ValueError(f"steps are counted from 0; {number} is none")
    return number


def keep_newest(root: Path, count: int) -> None:
    """Remove all checkpoints but the newest."""
    for old in _complete(root)[:-count]:
        remove_directory(old)


def chosen_checkpoint(path: Path) -> Path:
    """A checkpoint itself, by whatever name, or the latest in a directory."""
    if is_described(path) or (_NAME.fullmatch(path.name) and path.is_dir()):
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise FileNotFoundError(f"there is no checkpoint in {path}")
    return latest


def _complete(root: Path) -> list[Path]:
    """Checkpoints by step; what is still being written has another name."""
    found = [path for path in root.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))
