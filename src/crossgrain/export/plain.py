"""Plain tensors: what every program reads; see `files.export_plain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from .contents import Contents
from .layout import Layout


class Plain(Layout):
    """Plain tensors, with the numbers of `files.export_plain`."""

    name = "plain"
    kinds: ClassVar[frozenset[str]] = frozenset()

    def check(self, contents: Contents) -> None:
        """Every model has plain tensors."""

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        return {"config.json": contents.config}

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        return "quantization_config" not in config
