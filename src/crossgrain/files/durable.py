"""Write files and directories atomically: after a crash they are complete or absent, never partly written.

Data is first written to a hidden temporary name next to its destination and flushed to disk (fsync). Then the
temporary name is renamed to the final one, which file systems do atomically, and the parent directory is flushed too.
If the process is killed, only a file with a temporary name remains. Readers ignore these names.
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
from itertools import count
from pathlib import Path

_TEMPORARY = ".writing-"


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields a temporary path to write to.

    When the block ends, the temporary file replaces ``path``. If the block raises, the temporary file is removed and
    ``path`` is unchanged.
    """
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
    """Like `whole_file`, for a directory. ``path`` must not exist yet: a directory cannot be replaced atomically."""
    path = Path(path)
    temporary = new_directory_beside(path)
    try:
        yield temporary
        publish_directory(temporary, path)
    except BaseException:
        with suppress(OSError):  # also of rmtree itself, if it is interrupted
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_directory(temporary: Path, path: Path) -> None:
    """Flush a directory and its files to disk, then rename it from ``temporary`` to ``path``."""
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    os.rename(temporary, path)
    _sync(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and flush them to disk."""
    missing = [parent for parent in (path, *path.parents) if not parent.is_dir()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory. It is renamed first, so nobody sees it partly empty under its own name."""
    temporary = new_directory_beside(path)
    os.rename(path, temporary)  # over an empty directory
    shutil.rmtree(temporary)


def remove_remains(directory: Path) -> None:
    """Remove unfinished files in ``directory`` that were left by processes of this machine which no longer run."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        host, process, token, *_ = [*path.name.removeprefix(_TEMPORARY).split("-"), "", ""]
        if host == _host() and not _is_at_work(process, token):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A temporary name next to ``path`` that contains the host and the process that writes it."""
    return path.with_name(f"{_TEMPORARY}{_host()}-{os.getpid()}-{_token()}-{path.name}")


def new_directory_beside(path: Path) -> Path:
    """Create a directory with a temporary name next to ``path``.

    An attempt that was interrupted while it cleaned up has left a directory, and one in the background may still be
    writing to it. So it is left alone, and this one gets a number.
    """
    first = temporary_beside(path)
    for attempt in count():
        temporary = first.with_name(f"{first.name}-{attempt}" if attempt else first.name)
        with suppress(FileExistsError):
            temporary.mkdir()
            break
    return temporary


@cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


@cache
def _token() -> str:
    """A random string that distinguishes this process from an earlier one with the same process id."""
    return secrets.token_hex(4)


def _is_at_work(process: str, token: str) -> bool:
    if process == str(os.getpid()):
        return token == _token()
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:
        return True  # the process exists, but belongs to another user
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
