"""Files that are there whole or not at all, whenever the process or the machine stops.

What is written goes to a hidden temporary name beside its destination, down to the disk (fsync), and is then
renamed, which file systems do in one piece; the directory that holds the name is brought to the disk as
well. What a killed process leaves behind has a temporary name, which nobody reads.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_TEMPORARY = ".writing-"


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to. After the block it takes the place of ``path``; if the block fails, it goes."""
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The same with a directory. There must be no ``path`` yet: a directory cannot be replaced in one piece."""
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        temporary.mkdir()
        yield temporary
        publish_directory(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_directory(temporary: Path, path: Path) -> None:
    """Bring a directory to the disk and give it its name."""
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    os.rename(temporary, path)
    _sync(path.parent)


def make_directory(path: Path) -> None:
    """Make a directory that is not there yet, and those above it."""
    missing = [parent for parent in (path, *path.parents) if not parent.is_dir()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that it is never seen half empty under its name."""
    temporary = temporary_beside(path)
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def remove_remains(directory: Path) -> None:
    """Remove what processes of this machine that no longer run have left half written in ``directory``."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        host, process, token, *_ = [*path.name.removeprefix(_TEMPORARY).split("-"), "", ""]
        if host == _host() and not _is_at_work(process, token):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A name that nobody reads, and that tells which process writes there."""
    return path.with_name(f"{_TEMPORARY}{_host()}-{os.getpid()}-{_token()}-{path.name}")


@cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


@cache
def _token() -> str:
    """Tells this process from an earlier one of the same number."""
    return secrets.token_hex(4)


def _is_at_work(process: str, token: str) -> bool:
    if process == str(os.getpid()):
        return token == _token()
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:
        return True  # it is somebody else's
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
