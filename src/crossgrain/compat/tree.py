"""Build the tree of modules ``transformer_engine...`` from the tables in `names`, once, below this package."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from .facade import Facade
from .names import TREE

PACKAGE = __name__.rpartition(".")[0]
ROOTS = ("transformer_engine", "transformer_engine_torch")
_DIRECTORY = Path(__file__).parent
FILES = {
    "transformer_engine": _DIRECTORY / "__init__.py",
    "transformer_engine.debug": _DIRECTORY / "debug" / "__init__.py",
    "transformer_engine.debug.features": _DIRECTORY / "debug" / "features" / "__init__.py",
}
"""Files beside which scripts look for others: ``Path(transformer_engine.__file__).parent / "debug" / "features"``."""


def build() -> dict[str, ModuleType]:
    """Make all modules, by dotted name, and add them to ``sys.modules`` below this package."""
    modules: dict[str, ModuleType] = {}
    for name in sorted(TREE, key=lambda name: (isinstance(TREE[name], str), name)):  # facades first
        modules[name] = _made(name, modules)
    for name, module in modules.items():
        sys.modules[f"{PACKAGE}.{name}"] = module
        parent, _, child = name.rpartition(".")
        if parent:
            assert isinstance(modules[parent], Facade), (
                f"{parent} is a module of crossgrain itself, so no submodule can be added to it"
            )
            if child not in TREE[parent]:  # a function of the same name is what the attribute means
                vars(modules[parent])[child] = module
    return modules


def _made(name: str, modules: Mapping[str, ModuleType]) -> ModuleType:
    """Make one module. Its entry is the name of another module to use, or the table of a `Facade`."""
    entry = TREE[name]
    if name in modules:
        return modules[name]
    if isinstance(entry, str):
        return _made(entry, modules) if entry in TREE else importlib.import_module(entry)
    module = Facade(f"{PACKAGE}.{name}", entry, f"{name}, served by crossgrain.")
    spec = importlib.machinery.ModuleSpec(module.__name__, loader=None, is_package=True)
    vars(module).update(__spec__=spec, __path__=[], __package__=module.__name__)
    if name in FILES:
        vars(module)["__file__"] = str(FILES[name])
    return module


MODULES = build()
