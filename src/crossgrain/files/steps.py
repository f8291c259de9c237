"""Find, name and remove the checkpoints in a directory: ``step-00000042`` and so on."""

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
    """Return the path of the complete checkpoint with the highest step in ``root``, or None if there is none.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = cg.files.save_checkpoint(root, 7, model=model)
        ...     cg.files.latest_checkpoint(root) == path
        True
    """
    found = _complete(Path(root))
    return found[-1] if found else None


def path_of_new_step(root: Path, step: int) -> Path:
    """Return where to write the checkpoint of ``step``, and remove unfinished checkpoints of killed processes.

    Raises:
        FileExistsError: there is a checkpoint of this step or of a later one.
    """
    make_directory(root)
    remove_remains(root)
    latest = latest_checkpoint(root)
    if latest is not None and _step_of(latest) >= step:
        raise FileExistsError(
            f"{root} already has a checkpoint of step {_step_of(latest)}, so step {step} cannot be saved there: steps "
            "must increase. Resume from that checkpoint, remove it, or save to another directory"
        )
    return root / f"{_PREFIX}{step:08d}"


def checked_step(step: Any) -> int:
    """Return ``step`` as an int; raise if it is not an integer >= 0."""
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be >= 0, got {number}")
    return number


def keep_newest(root: Path, count: int) -> None:
    """Remove all checkpoints except the ``count`` newest ones."""
    for old in _complete(root)[:-count]:
        remove_directory(old)


def chosen_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, otherwise the latest checkpoint in the directory ``path``."""
    if is_described(path) or (_NAME.fullmatch(path.name) and path.is_dir()):
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise FileNotFoundError(f"there is no checkpoint in {path}")
    return latest


def _complete(root: Path) -> list[Path]:
    """All complete checkpoints, ordered by step. Unfinished ones have temporary names and are not found."""
    found = [path for path in root.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))
