"""The checks on the emulated device of `tests/gpu/fake_cuda`, whose kernels Triton interprets.

    python -m tests.on_gpu.without_gpu.emulated_device FILE

writes what they find to FILE, as JSON. It must have been started with the compiled device in LD_PRELOAD and with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from crossgrain.kernels.choice import backend_for

from ...gpu.fake_cuda import device
from ...gpu.fake_cuda.interpreted import serve_the_device
from ..finding import Deadline, Finding, check_each
from ..goldens import golden_checks
from ..layer_planes import check_planes
from ..placement import check_device
from ..products import check_products
from ..same_bytes import check_bytes
from ..training import check_losses, check_runs

GPU = torch.device("cuda", 0)
TIME = 1e6


def _goldens() -> Finding:
    some = list(golden_checks(GPU))[::40]
    return check_each(some, lambda check: check(), Deadline(TIME))


CHECKS: dict[str, Callable[[], Finding]] = {
    "bytes": lambda: check_bytes(backend_for("cuda"), GPU, Deadline(TIME), 0, 80),
    "goldens": _goldens,
    "planes": lambda: check_planes("mxfp8-fwd-nvfp4-bwd", GPU),
    "losses": lambda: check_losses("mxfp8", GPU, steps=1),
    "runs": lambda: check_runs(GPU, Deadline(TIME), ["Linear hybrid"]),
    "products": lambda: check_products("nvfp4", GPU),
    "placement": lambda: check_device("mxfp8", GPU, torch.device("cpu")),
}


def main() -> None:
    """Run all of them."""
    device.install()
    serve_the_device()
    found: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check().as_data()
        except Exception:
            found[name] = {"numbers": {}, "problems": [traceback.format_exc()]}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
