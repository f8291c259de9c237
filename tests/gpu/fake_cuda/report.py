"""The program that runs on the emulated device.

    python -m tests.gpu.fake_cuda.report FILE BACKEND < names

takes names of runs, one in a line, and writes what they did to FILE, as JSON. The backend of the device is "reference",
or "triton" for interpreted kernels. It must have been started with the compiled device in LD_PRELOAD, see `build`.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import crossgrain as cg

from ...common.logs import raise_warnings
from . import device
from .facts import FACTS
from .runs import RUNS
from .runs.common import Results, Run


def reported(run: Run) -> dict[str, Any]:
    """What a run did on the device: where the host waited, and how its results differ from those of the CPU."""
    expected, _ = _results(run, "cpu")
    results, waits = _results(run, "cuda")
    return {
        "waits": [vars(wait) for wait in waits],
        "elsewhere": [name for name, result in results.items() if result.device.type != "cuda"],
        "dtypes": [name for name, result in results.items() if result.dtype != expected[name].dtype],
        "missing": sorted(expected.keys() ^ results.keys()),
        "errors": {name: _error(result.cpu(), expected[name]) for name, result in results.items()},
    }


def _results(run: Run, on: str) -> tuple[Results, list[device.Wait]]:
    torch.manual_seed(1)
    step = run(on)
    torch.manual_seed(2)
    # Attention by the same sums on both: the CPU has a fused kernel, which adds up in another order.
    with device.watched() as waits, sdpa_kernel(SDPBackend.MATH):
        results = step()
    return results, waits


def _error(result: Tensor, expected: Tensor) -> float:
    if torch.equal(result, expected):
        return 0.0
    wide = expected.double()
    return float((result.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def _told(name: str) -> dict[str, Any]:
    try:
        return FACTS[name]() if name in FACTS else reported(RUNS[name])
    except Exception:
        return {"failed": traceback.format_exc()}


def main() -> None:
    """Run what is named on the standard input."""
    warnings.simplefilter("error")
    raise_warnings()
    device.install()
    out, backend = sys.argv[1:]
    if backend == "triton":
        from .interpreted import serve_the_device  # it imports Triton

        serve_the_device()
    else:
        cg.set_backend(backend)
    names = sys.stdin.read().splitlines()
    Path(out).write_text(json.dumps({name: _told(name) for name in names}))
    _let_go()


def _let_go() -> None:
    """Have the device's thread of autograd let go of the last backward, whose context is a Python object.

    It does so before it begins another one, which is therefore begun without a context. If it did so while Python
    shuts down, the process would be aborted.
    """
    result = torch.ones(1, device="cuda", requires_grad=True) * 2
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((result,), (torch.ones_like(result),), False, False, (), accumulate_grad=True)


if __name__ == "__main__":
    main()
