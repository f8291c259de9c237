"""How a linear layer scales with threads: wall time of forward and backward on one thread over that on several.

fp32 shows what the machine has to give: two threads of one core share its units.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from . import linear
from .timing import Job, least_times

LAYERS = ("MXFP8", "NVFP4", linear.HYBRID)
THREADS = 2


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step on one thread and on several."""

    name: str
    shape: linear.Shape
    one: float
    several: float


def run(shape: linear.Shape, only: str, repeats: int) -> list[Timing]:
    wanted: Mapping[str, linear.MakeLayer] = {
        "fp32": linear.plain,
        **{name: make for name, make in linear.layers().items() if name in LAYERS and only.lower() in name.lower()},
    }
    jobs: list[Job] = []
    for make in wanted.values():
        step = linear.step(make, shape)
        jobs += [_on(1, step), _on(THREADS, step)]
    times = [seconds * 1e3 for seconds in least_times(jobs, repeats, time.perf_counter)]
    return [
        Timing(name, shape, *pair) for name, pair in zip(wanted, zip(times[::2], times[1::2], strict=True), strict=True)
    ]


def _on(threads: int, step: Job) -> Job:
    def run_once() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            step()
        finally:
            torch.set_num_threads(before)

    return run_once


def rows(timings: list[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.name, f"{t.one:.1f} ms", f"{t.several:.1f} ms", f"{t.one / t.several:.2f}"] for t in timings]
