"""The checks on an emulated "cuda" device, with the kernels of the Triton backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...gpu.fake_cuda.build import built_library, why_not_built

_ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_checks_pass_on_the_emulated_device(request, tmp_path):
    reason = why_not_built()
    if reason is not None:
        pytest.skip(reason)
    library = built_library(request.config.cache.mkdir("fake_cuda"))
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.emulated_device", str(out)],
        env={**os.environ, "LD_PRELOAD": str(library), "TRITON_INTERPRET": "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert {name: told["problems"] for name, told in found.items() if told["problems"]} == {}
    assert found["bytes"]["numbers"]["checked"] >= 10 and found["goldens"]["numbers"]["checked"] >= 4
    assert found["planes"]["numbers"]["buffers_compared"] > 100
