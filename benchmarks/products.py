"""The GEMM of two quantized operands, decoding included, relative to torch's fp32 GEMM of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

import crossgrain as cg
from crossgrain.gemm import gemm

from .timing import least_times

Shape = tuple[int, int, int]  # rows, columns, summed

SHAPES: tuple[Shape, ...] = ((2048, 2048, 2048), (512, 1024, 1024), (128, 512, 512))
FORMATS = ("fp8", "fp8_block", "mxfp8", "nvfp4", "mxfp4")


@dataclass(frozen=True)
class Timing:
    format: str
    shape: Shape
    milliseconds: float
    ratio: float


def run(shapes: Sequence[Shape], only: str, repeats: int) -> list[Timing]:
    found = []
    names = [name for name in FORMATS if only.lower() in name]
    for rows, columns, inner in shapes:
        a, b, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.empty(rows, columns)
        jobs = [partial(torch.mm, a, b.t(), out=out)]
        for name in names:
            left, right = (cg.quantize(x, name, columnwise=False).plane(cg.ROWWISE) for x in (a, b))
            assert left is not None and right is not None
            jobs.append(partial(gemm, "fprop", left, right, out=out))
        plain, *times = least_times(jobs, repeats)
        shape = (rows, columns, inner)
        found += [Timing(name, shape, time * 1e3, time / plain) for name, time in zip(names, times, strict=True)]
    return found


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    names = dict.fromkeys(timing.format for timing in timings)
    return [[name, *(f"{timing.ratio:.2f}" for timing in timings if timing.format == name)] for name in names]
