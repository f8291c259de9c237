"""A plugin of pytest: Triton's kernels, interpreted, serve all CPU tensors. It counts what is launched.

TRITON_INTERPRET=1 pytest -p tests.gpu.kernels.on_triton tests/kernels/test_golden_planes.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from crossgrain.kernels import choice

launched: Counter[str] = Counter()
"""Launches of each kernel."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--outcome FILE``: write how many tests passed, and how often each kernel was launched, as JSON."""
    parser.addoption("--outcome", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Let the Triton backend serve CPU tensors, whatever a test chooses but the reference."""
    from triton.runtime.interpreter import InterpretedFunction

    from crossgrain.kernels.triton.backend import TritonBackend
    from crossgrain.kernels.triton.device.encode import encode_kernel

    from .interpreter import correct

    if not isinstance(encode_kernel, InterpretedFunction):
        raise pytest.UsageError("TRITON_INTERPRET=1 must be in the environment before Triton is imported")
    correct()
    choice._cpu = TritonBackend(_counted)
    choice.serving.clear()


def _counted(kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
    from .interpreter import checked_launch

    launched[kernel.fn.__name__] += 1
    checked_launch(kernel, programs, device, warps, arguments)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how often each kernel was launched."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(launched.items()))
    terminalreporter.write_line(f"launched kernels: {counts or 'none'}")
    file = config.getoption("--outcome")
    if file is not None:
        tests = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
        file.write_text(json.dumps({"tests": tests, "launched": launched}))
