"""Groups of rows, as the experts of a mixture have them: one call for all against one call for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.quantizers.groups import quantize_groups

from .timing import Job, least_times

ROWS, WIDTH = 4096, 1024
EXPERTS = (8, 64)


@dataclass(frozen=True)
class Timing:
    """Milliseconds for all groups, both directions."""

    name: str
    experts: int
    one_by_one_ms: float
    together_ms: float


def quantizers() -> dict[str, Callable[[], cg.Quantizer]]:
    """Formats with an amax or a scale for each group."""
    return {
        "fp8 current": lambda: cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3),
        "fp8 delayed": lambda: cg.Float8Quantizer(torch.ones(1), torch.zeros(1), cg.DType.kFloat8E4M3),
        "nvfp4": cg.NVFP4Quantizer,
        "nvfp4 + RHT + SR": lambda: cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
    }


def run(rows: int, only: str, repeats: int) -> list[Timing]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cases, jobs = [], []
    for experts in EXPERTS:
        sizes = uneven_sizes(rows, experts)
        for name, make in quantizers().items():
            if only in name:
                each = [make().storing(rowwise=True, columnwise=True) for _ in sizes]
                cases.append((name, experts))
                jobs += _ways(x, sizes, each)
    millis = [seconds * 1e3 for seconds in least_times(jobs, repeats)]
    return [Timing(*case, *both) for case, *both in zip(cases, millis[::2], millis[1::2], strict=True)]


def _ways(x: Tensor, sizes: Sequence[int], quantizers: Sequence[cg.Quantizer]) -> list[Job]:
    def one_by_one() -> object:
        return [quantizer(group) for quantizer, group in zip(quantizers, x.split(list(sizes)), strict=True)]

    return [one_by_one, lambda: quantize_groups(x, sizes, quantizers)]


def uneven_sizes(rows: int, experts: int) -> list[int]:
    """Multiples of 16, the last ones about three times as many as the first: no router is fair."""
    shares = [1 + 2 * expert / experts for expert in range(experts)]
    ends = [round(end / sum(shares) * rows / 16) * 16 for end in accumulate(shares, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [
        [
            t.name,
            str(t.experts),
            f"{t.one_by_one_ms:.2f}",
            f"{t.together_ms:.2f}",
            f"{t.one_by_one_ms / t.together_ms:.1f}",
        ]
        for t in timings
    ]
