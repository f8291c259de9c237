"""Prints what the extra ``docs`` of pyproject.toml lists: pip does not install an extra without its package."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    print(" ".join(project["optional-dependencies"]["docs"]))
