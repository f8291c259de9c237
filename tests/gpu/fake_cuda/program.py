"""Run the program on the emulated device from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]


def ran(names: Iterable[str], library: Path, directory: Path, backend: str = "reference") -> dict[str, Any]:
    """What runs and facts tell, by name. All of them run in one process.

    Args:
        names: names of runs and facts.
        library: the compiled device.
        directory: an empty directory.
        backend: the kernels of the device, "reference" or "triton".

    Raises:
        RuntimeError: the process has failed.
    """
    out = directory / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.report", str(out), backend],
        input="\n".join(names),
        env={**os.environ, "LD_PRELOAD": str(library), "TRITON_INTERPRET": "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"the program on the emulated device has ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    report: dict[str, Any] = json.loads(out.read_text())
    return report
