"""A copy of the package, whose sources a test may edit or lock."""

import shutil
from pathlib import Path

import crossgrain


def copied_package(folder: Path) -> Path:
    """Copy ``crossgrain`` into ``folder``, with Python's bytecode but without machine code.

    Bytecode is valid for a source of the same time and size, which a copy keeps and an edit changes. Without it, every
    process would begin by compiling all of the package.
    """
    copy = folder / "crossgrain"
    shutil.copytree(Path(crossgrain.__file__).parent, copy, ignore=shutil.ignore_patterns("*.nbi", "*.nbc"))
    return copy
