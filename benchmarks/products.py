"""The GEMM of two quantized operands, decoding included, relative to torch's fp32 GEMM of the same shape.

"mxfp8 by panels" decodes a panel of the second operand right before it is multiplied. It is slower: no GEMM does so.
"bf16 by torch" is torch's own GEMM of bf16 matrices, which is used where it is faster than fp32: with AMX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.cli.checkup.processor import amx_problem
from crossgrain.gemm import gemm
from crossgrain.kernels import decode_operand, workspace
from crossgrain.planes import Plane

from .timing import Job, least_times

Shape = tuple[int, int, int]  # rows, columns, summed

SHAPES: tuple[Shape, ...] = ((2048, 2048, 2048), (512, 1024, 1024), (128, 512, 512))
FORMATS = ("fp8", "fp8_block", "mxfp8", "nvfp4", "mxfp4")
BY_PANELS, PANEL = "mxfp8 by panels", 256
BF16 = "bf16 by torch"


@dataclass(frozen=True)
class Timing:
    format: str
    shape: Shape
    milliseconds: float
    ratio: float


def run(shapes: Sequence[Shape], only: str, repeats: int) -> list[Timing]:
    found = []
    names = [name for name in (*FORMATS, BY_PANELS, BF16) if only.lower() in name]
    if BF16 in names and (problem := amx_problem()) is not None:
        print(f"{BF16} is left out: {problem}")
        names.remove(BF16)
    for rows, columns, inner in shapes:
        a, b, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.empty(rows, columns)
        jobs: list[Job] = [partial(torch.mm, a, b.t(), out=out)]
        for name in names:
            if name == BF16:
                jobs.append(partial(torch.mm, a.bfloat16(), b.bfloat16().t()))
            elif name == BY_PANELS:
                jobs.append(partial(_multiply_by_panels, _plane(a, "mxfp8"), _panels(b, "mxfp8"), out))
            else:
                jobs.append(partial(gemm, "fprop", _plane(a, name), _plane(b, name), out=out))
        plain, *times = least_times(jobs, repeats)
        shape = (rows, columns, inner)
        found += [Timing(name, shape, time * 1e3, time / plain) for name, time in zip(names, times, strict=True)]
    return found


def _plane(x: Tensor, name: str) -> Plane:
    plane = cg.quantize(x, name, columnwise=False).plane(cg.ROWWISE)
    assert plane is not None
    return plane


def _panels(x: Tensor, name: str) -> list[Plane]:
    return [_plane(rows, name) for rows in x.split(PANEL)]


def _multiply_by_panels(left: Plane, panels: Sequence[Plane], out: Tensor) -> None:
    decoded = decode_operand(left, workspace("gemm.left", left.shape[0] * left.shape[1]))
    for panel, part in zip(panels, out.split(PANEL, dim=1), strict=True):
        gemm("fprop", decoded, panel, out=part, allow_mixed=True)


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    names = dict.fromkeys(timing.format for timing in timings)
    return [[name, *(f"{timing.ratio:.2f}" for timing in timings if timing.format == name)] for name in names]
