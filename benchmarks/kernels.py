"""Time of the kernels, format by format, in units of a plain copy of the same matrix.

A copy is the least that any pass over the matrix costs, and dividing by it takes most of the machine out
of the number. Times are CPU times of one thread, the least of several repeats; the repeats of all
kernels are interleaved, so that a slow moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats import Format, formats

DIRECTIONS = {
    "rowwise": (cg.ROWWISE,),
    "columnwise": (cg.COLUMNWISE,),
    "both": (cg.ROWWISE, cg.COLUMNWISE),
}


@dataclass(frozen=True)
class Timing:
    """How long encoding and decoding take, as multiples of the copy."""

    format: str
    direction: str
    encode: float
    decode: float


def environment(x: Tensor) -> dict[str, str | int]:
    return {
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "backend": kernels.get_backend(x.device.type),
    }


def cpu_model() -> str:
    """The processor's name; Linux knows it best, elsewhere Python's answer has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def kernel_jobs(x: Tensor, fmt: Format, direction: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Encode and decode of ``x`` with the format's default options, to be timed. Planes are allocated before."""
    wanted = DIRECTIONS[direction]
    quantizer = cg.quantizer_for(fmt.name, rowwise=cg.ROWWISE in wanted, columnwise=cg.COLUMNWISE in wanted)
    q = quantizer(x)
    planes = [q.plane(direction) for direction in wanted]
    # Per-tensor FP8 may keep one buffer for both directions, which is then written once.
    to_write = {plane.data.data_ptr(): plane for plane in planes}.values()
    targets = [kernels.Target(plane, quantizer.encoding(plane.direction)) for plane in to_write]
    return (
        lambda: kernels.encode(x, kernels.measure(x, targets)),
        lambda: [kernels.decode(plane, torch.float32) for plane in planes],
    )


def least_times(jobs: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of CPU time that each job takes at best. Each runs once untimed just before it is timed."""
    least = [float("inf")] * len(jobs)
    for _ in range(repeats):
        for index, job in enumerate(jobs):
            job()
            start = time.thread_time()
            job()
            least[index] = min(least[index], time.thread_time() - start)
    return least


def run(x: Tensor, repeats: int) -> tuple[float, list[Timing]]:
    """Seconds of the copy, and all timings relative to it."""
    copy = torch.empty_like(x)
    cases = [(fmt, direction) for fmt in formats() for direction in DIRECTIONS]
    jobs: list[Callable[[], object]] = [lambda: copy.copy_(x)]
    for fmt, direction in cases:
        jobs += kernel_jobs(x, fmt, direction)
    copy_time, *times = least_times(jobs, repeats)
    pairs = zip(times[::2], times[1::2], strict=True)
    return copy_time, [
        Timing(fmt.name, direction, encode / copy_time, decode / copy_time)
        for (fmt, direction), (encode, decode) in zip(cases, pairs, strict=True)
    ]


def print_report(about: dict[str, str | int], size: int, copy_time: float, timings: list[Timing]) -> None:
    for key, value in about.items():
        print(f"{key:<8} {value}")
    print(f"{'copy':<8} {copy_time * 1e3:.3f} ms for fp32 [{size}, {size}]; all times below are multiples of it\n")
    head = f"{'format':<20} {'direction':<12} {'encode':>8} {'decode':>8}"
    print(head)
    print("-" * len(head))
    for timing in timings:
        print(f"{timing.format:<20} {timing.direction:<12} {timing.encode:>8.1f} {timing.decode:>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the matrix, a multiple of 128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    arguments = parser.parse_args()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(arguments.size, arguments.size, generator=torch.Generator().manual_seed(0))
        about = environment(x)
        copy_time, timings = run(x, arguments.repeats)
    finally:
        torch.set_num_threads(threads)
    print_report(about, arguments.size, copy_time, timings)
    if arguments.json:
        report = {"environment": about, "size": arguments.size, "copy_seconds": copy_time}
        report["timings"] = [asdict(timing) for timing in timings]
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
