"""Rooms import in one order: each package of crossgrain uses only those before it, wherever the import stands."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossgrain

ROOMS = (
    "runtime",
    "formats",
    "planes",
    "kernels",
    "gemm",
    "tensor",
    "quantizers",
    "recipe",
    "offload",
    "linear",
    "optim",
    "nn",
    "ops",
    "convert",
    "files",
    "export",
    "distributed",
    "gpt",
    "planning",
    "lab",
    "integrations",
    "compat",
    "te",
    "cli",
)

# Imports by a name that is not in the source, and what they import.
DYNAMIC_IMPORTS = {
    "__init__.py": "rooms that are imported when they are first used",
    "recipe/portable.py": "a function of the user that a recipe names",
    "cli/imports.py": "a module of the user that registers formats",
    "compat/facade.py": "the modules of its own tables, whose names are checked like all strings",
    "compat/tree.py": "the modules of its own tables, whose names are checked like all strings",
}

SOURCE = Path(crossgrain.__file__).parent
DESIGN = Path(__file__).parent.parent / "docs" / "explanation" / "design.md"


def names_a_module(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"crossgrain\.[\w.:]+", value) is not None


def imported_modules(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything of crossgrain that a file refers to, at any depth of its syntax tree."""
    package = ("crossgrain", *path.parent.parts)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if base == "crossgrain" else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and names_a_module(node.value):
            yield node.lineno, node.value  # sys.modules[...], importlib.import_module(...), tables of names


def dynamic_imports(tree: ast.Module) -> Iterator[int]:
    """Lines that import a module whose name, or relative name, only the running program knows."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            literal = isinstance(argument, ast.Constant) and str(argument.value).startswith(("crossgrain.", "torch"))
            if not literal:
                yield node.lineno


def offences(path: Path, source: str) -> list[str]:
    """What a file, at ``path`` inside the package, must not import: ``file:line: reason``."""
    tree = ast.parse(source)
    found = []
    own = ROOMS.index(path.parts[0]) if path.parts[0] in ROOMS else len(ROOMS)
    for line, module in imported_modules(path, tree):
        parts = re.split(r"[.:]", module)
        if parts[0] != "crossgrain" or own == len(ROOMS):
            continue
        room = parts[1] if len(parts) > 1 else ""
        if room not in ROOMS:
            found.append(f"{path}:{line}: imports {module}, which belongs to no room")
        elif ROOMS.index(room) > own:
            found.append(f"{path}:{line}: {path.parts[0]} imports {module}, but {room} comes after it")
    if path.as_posix() not in DYNAMIC_IMPORTS:
        found += [f"{path}:{line}: imports a module by a name that cannot be checked" for line in dynamic_imports(tree)]
    return found


def test_every_room_imports_only_the_rooms_before_it():
    found = [
        offence for path in SOURCE.rglob("*.py") for offence in offences(path.relative_to(SOURCE), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


def test_everything_lies_in_a_room():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "from ..nn import Linear",
        "from .. import nn",
        "from ..nn.linear import Linear",
        "import crossgrain.nn",
        "from crossgrain import nn",
        "def late():\n    from ..nn.linear import Linear",
        "if TYPE_CHECKING:\n    from ..nn import base",
        "importlib.import_module('crossgrain.nn')",
        "importlib.import_module('..nn', __package__)",
        "__import__(name)",
        "sys.modules['crossgrain.nn.linear']",
        "from .. import __version__",
    ],
)
def test_an_import_of_a_later_room_is_found_in_every_disguise(source):
    (found,) = offences(Path("tensor/example.py"), source)
    line = len(source.splitlines())
    assert found.startswith(f"tensor/example.py:{line}: ")


def test_an_import_of_an_earlier_room_is_none():
    source = '''
        """Tables of crossgrain.nn stand elsewhere."""
        from .. import kernels
        from ..planes import Plane
        from . import dispatch
        import torch, importlib
    '''
    assert offences(Path("tensor/example.py"), textwrap.dedent(source)) == []


def test_the_design_document_lists_the_rooms_in_their_order():
    text = DESIGN.read_text()
    table = text[text.index("## Rooms") :].split("\n## ")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert tuple(listed) == ROOMS


def test_the_guide_to_the_code_names_files_that_are_there():
    text = (DESIGN.parents[2] / "CONTRIBUTING.md").read_text()
    table = text[text.index("### Where is what") :].split("\n\n")[1]
    named = re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", table)
    walk = DESIGN.read_text().partition("### The walk of one step")[2].partition("\nRooms only")[0]
    named += re.findall(r"`([a-z_]+/\w+\.py)`", walk)
    assert len(named) > 30
    assert [name for name in named if not (SOURCE / name).exists()] == []
