"""Questions about CUDA graphs and ONNX export, which never run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_graph_capturing() -> bool:
    return False


def is_in_onnx_export_mode() -> bool:
    return False


def assert_warmed_up(module: Any) -> None:
    """Do nothing: modules need no warm-up before an export."""


def no_torch_dynamo(recursive: bool = True) -> Callable[[Any], Any]:
    """A decorator that excludes a function from torch.compile."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)
