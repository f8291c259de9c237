"""Run a script or a module with crossgrain instead of Transformer Engine.

python -m crossgrain.te [--replace] script.py arguments...
python -m crossgrain.te [--replace] -m package.module arguments...
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from ..compat import install

USAGE = "usage: python -m crossgrain.te [--replace] (script.py | -m module) [arguments ...]"


def main(arguments: list[str]) -> None:
    """Run the script or module that ``arguments`` name as ``__main__``, as Python itself would."""
    replace = arguments[:1] == ["--replace"]
    rest = arguments[1:] if replace else arguments
    if not rest or rest[0] in ("-h", "--help") or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) == 1)):
        asked = bool(rest) and rest[0] in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    try:
        install(replace=replace)
    except RuntimeError as error:
        raise SystemExit(f"crossgrain.te: {error}") from error
    if rest[0] == "-m":
        _run_module(rest[1], rest[1:])
    else:
        _run_script(rest[0], rest)


def _run_script(script: str, argv: list[str]) -> None:
    path = os.path.abspath(script)
    if pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__.py
        sys.argv = argv
        runpy.run_path(script, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"crossgrain.te: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    _run_as_main(loader.source_to_code(source, path), __file__=path, __loader__=loader, __package__=None)


def _run_module(name: str, argv: list[str]) -> None:
    """Run a module, or the ``__main__`` of a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:  # its parent is not a package
        raise SystemExit(f"crossgrain.te: cannot run {name}: {error}") from error
    if spec is None:
        raise SystemExit(f"crossgrain.te: No module named {name}")
    if spec.submodule_search_locations is not None:
        _run_module(f"{name}.__main__", argv)
        return
    loader: Any = spec.loader
    code = loader.get_code(name)
    if code is None:
        raise SystemExit(f"crossgrain.te: cannot run {name}: it has no Python code")
    sys.argv = [spec.origin or name, *argv[1:]]
    _run_as_main(code, __file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec)


def _run_as_main(code: CodeType, **facts: Any) -> None:
    """Run code in a module that stays ``__main__``, because threads and exit handlers may outlive the last line."""
    module = ModuleType("__main__")
    vars(module).update(facts, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
