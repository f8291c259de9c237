"""Which emulated tests have passed, so that a run of hours can be interrupted and go on: ``--resume FOLDER``.

The folder has a file for each version of Triton, with the state of all that these tests depend on in its name: kernels,
reference, formats, planes, emulator and cases, without comments and docstrings. Another state begins a new file, so
that a run which began before a change cannot record what passed then as if it had passed now.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "src/crossgrain/formats",
    "src/crossgrain/planes",
    "src/crossgrain/kernels/triton",
    "src/crossgrain/kernels/reference",
)
FILES = (  # of `kernels` not what chooses, plans and compiles for CPUs
    *(f"src/crossgrain/kernels/{name}.py" for name in ("global_scale", "layout", "marks", "partial", "target")),
    "src/crossgrain/kernels/transpose.py",
    "src/crossgrain/runtime/host_and_device.py",
    "src/crossgrain/runtime/random_numbers.py",
    "tests/common/encodings.py",
)
TESTS = ("tests/gpu/ptx", "tests/gpu/offline", "tests/gpu/gates", "tests/gpu/kernels")
RECORDED = ("tests/gpu/gates/", "tests/gpu/kernels/test_emulated")
"""Where recorded tests lie: those that compile kernels for GPUs, which take nearly all of the time."""


def state(root: Path = ROOT) -> str:
    """A name of what emulated tests depend on."""
    found = hashlib.sha256()
    for file in _files(root):
        found.update(f"{file.relative_to(root)}\n{_code(file.read_text())}\n".encode())
    return found.hexdigest()[:16]


def _files(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted((root / folder).rglob("*.py"))
    for pattern in FILES:
        yield from sorted(root.glob(pattern))
    for folder in TESTS:  # the tests of the emulator itself, and of the code of the host, change nothing
        unlike = "test_emulated*.py" if folder.endswith("kernels") else "test_gates.py"
        files = sorted((root / folder).glob("*.py"))
        yield from (file for file in files if not file.match("test_*.py") or file.match(unlike))


@cache
def _code(text: str) -> str:
    """The program without comments, docstrings and places."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return ast.dump(tree)


def name_of(nodeid: str) -> str:
    """The name of a test, without the group that pytest-xdist adds: ``test_a[x@y]@group`` is ``test_a[x@y]``."""
    before, bracket, after = nodeid.rpartition("]")
    return before + bracket + after.split("@")[0]


class Passed:
    """The tests of a file that have passed in this state.

    Args:
        folder: where files are kept.
        triton: the version of Triton.
        now: the present state.
    """

    def __init__(self, folder: Path, triton: str, now: str) -> None:
        self._file = folder / f"triton-{triton}-{now}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.glob(f"triton-{triton}-*.txt"):
            if other != self._file:
                other.unlink(missing_ok=True)  # the workers of a run do this at the same time
        text = self._file.read_text() if self._file.exists() else ""
        self._names = set(text.split("\n")[:-1])  # without a line that was not written to its end

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Record a test, at once: the run may end at any time."""
        if name.startswith(RECORDED) and name not in self._names:
            self._names.add(name)
            with self._file.open("a") as file:
                file.write(name + "\n")
