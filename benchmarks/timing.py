"""How everything here is timed, and on what.

Times are CPU times of one thread, the least of several repeats. Jobs that are compared are interleaved, so that
a slow moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import crossgrain as cg
from crossgrain import kernels

Job = Callable[[], object]
SECONDS_PER_JOB = 3.0  # a job that takes long is not repeated as often


def least_times(
    jobs: Sequence[Job], repeats: int, clock: Callable[[], float] = time.thread_time, before: Job = lambda: None
) -> list[float]:
    """Seconds that each job takes at best, after one untimed run; ``before`` runs before each and is not timed."""
    for job in jobs:
        job()
    least, spent = [float("inf")] * len(jobs), [0.0] * len(jobs)
    for _ in range(repeats):
        for index, job in enumerate(jobs):
            if spent[index] > SECONDS_PER_JOB:
                continue
            before()
            start = clock()
            job()
            took = clock() - start
            least[index], spent[index] = min(least[index], took), spent[index] + took
    return least


def give_memory_back() -> None:
    """Return what the process has freed to the system (glibc only), so that no job finds the pages of another.

    A large new tensor is then as expensive as it is in a program of its own, whatever ran before.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU time of the calling thread is all the time there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        kernels.free_workspaces()


def environment() -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "backend": cg.get_backend(),
    }
    with suppress(PackageNotFoundError):
        found["torchao"] = version("torchao")
    return found


def cpu_model() -> str:
    """The processor's name; Linux knows it best, elsewhere Python's answer has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
