"""What a small tensor costs: Python and all, by the clock on the wall, through the quantizers that users call."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import crossgrain as cg

from .timing import Job, least_times

SIZE = 64


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: both directions are made, one is decoded."""

    name: str
    quantize_us: float
    dequantize_us: float


def quantizers() -> dict[str, cg.Quantizer]:
    """What layers use most."""
    return {
        "mxfp8": cg.quantizer_for("mxfp8"),
        "nvfp4": cg.quantizer_for("nvfp4"),
        "nvfp4 + RHT + SR": cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
        "fp8": cg.quantizer_for("fp8"),
        "fp8_block": cg.quantizer_for("fp8_block"),
        "mxfp8 | nvfp4": cg.HybridQuantizer(
            rowwise_quantizer=cg.quantizer_for("mxfp8"), columnwise_quantizer=cg.quantizer_for("nvfp4")
        ),
    }


def run(only: str, repeats: int) -> list[Timing]:
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    wanted = {name: quantizer for name, quantizer in quantizers().items() if only in name}
    jobs: list[Job] = []
    for quantizer in wanted.values():
        jobs += [lambda make=quantizer: make(x), quantizer(x).dequantize]  # type: ignore[misc]
    micros = [seconds * 1e6 for seconds in least_times(jobs, repeats, time.perf_counter)]
    return [Timing(*row) for row in zip(wanted, micros[::2], micros[1::2], strict=True)]


def rows(timings: list[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.name, f"{t.quantize_us:.0f}", f"{t.dequantize_us:.0f}"] for t in timings]
