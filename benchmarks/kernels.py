"""Time of the kernels in units of a plain copy of the same matrix, as a table, JSON and a bar chart.

A copy is the least that a pass over the matrix costs, and dividing by it takes most of the machine out of
the number. Times are CPU times of one thread, the least of several repeats; the repeats of all kernels
are interleaved, so that a slow moment of the machine does not fall on one of them alone.

``amax`` is the pass that finds the global amax, where the format needs one. ``encode`` writes planes that
are allocated before, ``decode`` writes the fp32 GEMM operand of each plane to a workspace.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats import formats

ROW, COLUMN = (cg.ROWWISE,), (cg.COLUMNWISE,)
BOTH = ROW + COLUMN
E4M3 = cg.DType.kFloat8E4M3
SECONDS_PER_JOB = 3.0  # a job that takes long is not repeated as often


@dataclass(frozen=True)
class Case:
    """A quantizer for each direction that is written."""

    name: str
    direction: str
    quantizers: dict[cg.Direction, cg.Quantizer]


@dataclass(frozen=True)
class Timing:
    """Multiples of the copy; 0 where there is nothing to do."""

    name: str
    direction: str
    amax: float
    encode: float
    decode: float


def cases() -> list[Case]:
    """Every format in its default options, the options of NVFP4, and pairs of formats."""
    rht = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    sr = cg.NVFP4Quantizer(stochastic_rounding=True)
    rht_sr = cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)
    found = []
    for fmt in formats():
        if fmt.is_identity:
            continue
        for label, directions in (("row", ROW), ("column", COLUMN), ("both", BOTH)):
            found.append(Case(fmt.name, label, dict.fromkeys(directions, cg.quantizer_for(fmt))))
    found.append(Case("nvfp4 + SR", "row", {cg.ROWWISE: sr}))
    found.append(Case("nvfp4 + RHT", "column", {cg.COLUMNWISE: rht}))
    found.append(Case("nvfp4 + RHT + SR", "both", dict.fromkeys(BOTH, rht_sr)))
    mxfp8, nvfp4, fp8 = (cg.quantizer_for(name) for name in ("mxfp8", "nvfp4", "fp8"))
    for row, column in ((("mxfp8", mxfp8), ("nvfp4", nvfp4)), (("mxfp8", mxfp8), ("nvfp4 + RHT", rht))):
        found.append(Case(f"{row[0]} | {column[0]}", "both", {cg.ROWWISE: row[1], cg.COLUMNWISE: column[1]}))
    found.append(Case("fp8 | nvfp4 + RHT", "both", {cg.ROWWISE: fp8, cg.COLUMNWISE: rht}))
    found.append(Case("nvfp4 | mxfp8", "both", {cg.ROWWISE: nvfp4, cg.COLUMNWISE: mxfp8}))
    return found


def jobs_of(case: Case, x: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a case."""
    with cg.settings.override(non_tn_fp8_gemm=False):  # per-tensor FP8 with its transposed copy
        planes = [plane(quantizer, direction, x) for direction, quantizer in case.quantizers.items()]
    encodings = [quantizer.encoding(direction) for direction, quantizer in case.quantizers.items()]
    bare = [kernels.Target(plane, encoding) for plane, encoding in zip(planes, encodings, strict=True)]
    targets = kernels.measure(x, bare)
    jobs: dict[str, Callable[[], object]] = {
        "encode": lambda: kernels.encode(x, targets, seed=1),
        "decode": lambda: [kernels.decode_operand(plane, kernels.workspace("a", x.numel())) for plane in planes],
    }
    if any(target.amax is not None for target in targets):
        jobs["amax"] = lambda: kernels.measure(x, [replace(target, amax=None) for target in targets])
    return jobs


def plane(quantizer: cg.Quantizer, direction: cg.Direction, x: Tensor) -> cg.Plane:
    quantizer = quantizer.copy()
    quantizer.set_usage(rowwise=direction is cg.ROWWISE, columnwise=direction is cg.COLUMNWISE)
    made = quantizer.make_empty(x.shape).plane(direction)
    assert isinstance(made, cg.Plane)
    return made


def least_times(jobs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of CPU time that each job takes at best, after one untimed run."""
    for job in jobs:
        job()
    least, spent = [float("inf")] * len(jobs), [0.0] * len(jobs)
    for _ in range(repeats):
        for index, job in enumerate(jobs):
            if spent[index] > SECONDS_PER_JOB:
                continue
            start = time.thread_time()
            job()
            took = time.thread_time() - start
            least[index], spent[index] = min(least[index], took), spent[index] + took
    return least


def run(x: Tensor, wanted: Sequence[Case], repeats: int) -> tuple[float, list[Timing]]:
    """Seconds of the copy, and all timings relative to it."""
    copy = torch.empty_like(x)
    named = [jobs_of(case, x) for case in wanted]
    flat: list[Callable[[], object]] = [lambda: copy.copy_(x)]
    flat += [job for jobs in named for job in jobs.values()]
    copy_time, *times = least_times(flat, repeats)
    rest = iter(times)
    timings = []
    for case, jobs in zip(wanted, named, strict=True):
        ratios = {what: next(rest) / copy_time for what in jobs}
        timings.append(Timing(case.name, case.direction, ratios.get("amax", 0.0), ratios["encode"], ratios["decode"]))
    return copy_time, timings


def environment() -> dict[str, str | int]:
    return {
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "backend": cg.get_backend(),
    }


def cpu_model() -> str:
    """The processor's name; Linux knows it best, elsewhere Python's answer has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def print_report(about: dict[str, str | int], size: int, copy_time: float, timings: Sequence[Timing]) -> None:
    for key, value in about.items():
        print(f"{key:<8} {value}")
    print(f"{'copy':<8} {copy_time * 1e3:.2f} ms for fp32 [{size}, {size}]; all times below are multiples of it\n")
    head = f"{'format':<22} {'direction':<10} {'amax':>8} {'encode':>8} {'decode':>8}"
    print(head)
    print("-" * len(head))
    for timing in timings:
        amax = f"{timing.amax:8.2f}" if timing.amax else " " * 8
        print(f"{timing.name:<22} {timing.direction:<10} {amax} {timing.encode:8.2f} {timing.decode:8.2f}")


def draw(timings: Sequence[Timing], path: Path) -> None:
    """Bars of encode and decode for what has compiled kernels; the line is the copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [timing for timing in timings if timing.encode < 5 and "e5m2" not in timing.name]  # E5M2 is like E4M3
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(shown)), layout="constrained")
    places = range(len(shown), 0, -1)
    axes.barh([y + 0.18 for y in places], [t.encode for t in shown], 0.34, color="#c8553d", label="encode")
    axes.barh([y - 0.18 for y in places], [t.decode for t in shown], 0.34, color="#3b6fb6", label="decode")
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.annotate("a copy", (1.0, len(shown) + 0.75), (4, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_yticks(list(places), [f"{t.name}, {t.direction}" for t in shown], fontsize=8)
    axes.set_ylim(0.3, len(shown) + 1.1)
    axes.set_xlabel("time, multiples of an fp32 copy of the same matrix (one thread)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix, a multiple of 128")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the compiled kernels")
    arguments = parser.parse_args()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(arguments.size, arguments.size, generator=torch.Generator().manual_seed(0))
        about = environment()
        copy_time, timings = run(x, [case for case in cases() if arguments.only in case.name], arguments.repeats)
    finally:
        torch.set_num_threads(threads)
        kernels.free_workspaces()
    print_report(about, arguments.size, copy_time, timings)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": about, "size": arguments.size, "copy_seconds": copy_time}
        report["timings"] = [asdict(timing) for timing in timings]
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.chart:
        draw(timings, arguments.chart)


if __name__ == "__main__":
    main()
