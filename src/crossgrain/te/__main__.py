"""Run a script or a module with crossgrain in the place of Transformer Engine.

python -m crossgrain.te [--replace] script.py arguments...
python -m crossgrain.te [--replace] -m package.module arguments...
"""

from __future__ import annotations

import os
import runpy
import sys

from ..compat import install

USAGE = "usage: python -m crossgrain.te [--replace] (script.py | -m module) [arguments ...]"


def main(arguments: list[str]) -> None:
    """Run what ``arguments`` name as ``__main__``, as Python itself would."""
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
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
