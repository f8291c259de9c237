"""Graphs and exports that are never under way here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_graph_capturing() -> bool:
    return False


def is_in_onnx_export_mode() -> bool:
    return False


def assert_warmed_up(module: Any) -> None:
    """Modules need no run before they are exported."""


def no_torch_dynamo(recursive: bool = True) -> Callable[[Any], Any]:
    """A decorator that keeps torch.compile out."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)
