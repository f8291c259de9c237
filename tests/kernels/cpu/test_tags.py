"""Compiled code is cached on disk under a digest of its sources, so it must be known which files these are."""

import ast
from pathlib import Path

import pytest

import crossgrain
from crossgrain.kernels.cpu import tags

FOLDER = Path(crossgrain.__file__).parent / "kernels" / "cpu"
KERNEL_FILES = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in tags.CALLERS]


def imported_here(path):
    tree = ast.parse(path.read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}


@pytest.mark.parametrize("name", tags.CALLERS)
def test_callers_of_kernels_hold_no_compiled_code(name):
    source = (FOLDER / f"{name}.py").read_text()
    assert not any(word in source for word in ("@kernel", "@inner", "@overload", "@intrinsic", "njit("))


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_kernels_are_made_of_kernel_files_alone(path):
    """`disk_cache` keeps compiled code and takes no part in it."""
    assert imported_here(path) & set(tags.CALLERS) <= {"disk_cache"}
