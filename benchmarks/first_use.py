"""What the first step of a program costs in which nothing is compiled yet: CPU time, in a process of its own.

Kernels are compiled when they are first used. A second step shows what the step itself takes, which is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

RECIPES = ("mxfp8", "mxfp8-fwd-nvfp4-bwd", "nvfp4")
TARGETS = {"mxfp8": 3.0, "mxfp8-fwd-nvfp4-bwd": 6.0, "everything": 90.0}
EVERYTHING = "everything"  # what `crossgrain warmup` compiles
QUICK_RECIPES = ("mxfp8",)

_STEP = """
import sys, time, torch, crossgrain as cg
layer = torch.nn.Linear(256, 256)
cg.convert(layer, sys.argv[1])
x, took = torch.randn(64, 256, requires_grad=True), []
for _ in range(2):
    start = time.process_time()
    layer(x).sum().backward()
    took.append(time.process_time() - start)
print(took[0] - took[1])
"""
_WARM_UP = """
import sys, time
from crossgrain.kernels.warmup import warm_up
start = time.process_time()
for step in warm_up():
    pass
print(time.process_time() - start)
"""


@dataclass(frozen=True)
class Timing:
    """Seconds for compiling what a recipe needs, at the first step of a layer."""

    recipe: str
    seconds: float
    target: float | None


def run(recipes: Sequence[str], only: str, everything: bool) -> list[Timing]:
    wanted = [(recipe, _STEP) for recipe in recipes if only in recipe]
    if everything and only in EVERYTHING:
        wanted.append((EVERYTHING, _WARM_UP))
    return [Timing(name, _seconds(program, name), TARGETS.get(name)) for name, program in wanted]


def _seconds(program: str, recipe: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, recipe]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.recipe, f"{t.seconds:.1f}" + (f" ({t.target:.0f})" if t.target else "")] for t in timings]
