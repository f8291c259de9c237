"""Time of the kernels in units of a plain copy of the same matrix.

A copy is the least that a pass over the matrix costs, and dividing by it takes most of the machine out of
the number. ``amax`` is the pass that finds the global amax, where the format needs one. ``encode`` writes planes
that are allocated before, ``decode`` writes the fp32 GEMM operand of each plane to a workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats import formats

from .timing import Job, least_times

ROW, COLUMN = (cg.ROWWISE,), (cg.COLUMNWISE,)
BOTH = ROW + COLUMN


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


@dataclass(frozen=True)
class Report:
    size: int
    copy_seconds: float
    timings: list[Timing]


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


def jobs_of(case: Case, x: Tensor) -> dict[str, Job]:
    """What is timed of a case."""
    with cg.settings.override(non_tn_fp8_gemm=False):  # per-tensor FP8 with its transposed copy
        planes = [plane(quantizer, direction, x) for direction, quantizer in case.quantizers.items()]
    encodings = [quantizer.encoding(direction) for direction, quantizer in case.quantizers.items()]
    bare = [kernels.Target(plane, encoding) for plane, encoding in zip(planes, encodings, strict=True)]
    targets = kernels.measure(x, bare)
    jobs: dict[str, Job] = {
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


def run(size: int, only: str, repeats: int) -> Report:
    """The copy, and the kernels of all cases whose name contains ``only`` relative to it."""
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(x)
    wanted = [case for case in cases() if only in case.name]
    named = [jobs_of(case, x) for case in wanted]
    flat: list[Job] = [lambda: copy.copy_(x)]
    flat += [job for jobs in named for job in jobs.values()]
    copy_time, *times = least_times(flat, repeats)
    rest = iter(times)
    timings = []
    for case, jobs in zip(wanted, named, strict=True):
        ratios = {what: next(rest) / copy_time for what in jobs}
        timings.append(Timing(case.name, case.direction, ratios.get("amax", 0.0), ratios["encode"], ratios["decode"]))
    return Report(size, copy_time, timings)


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [
        [t.name, t.direction, f"{t.amax:.2f}" if t.amax else "", f"{t.encode:.2f}", f"{t.decode:.2f}"] for t in timings
    ]
