"""A linear layer in inference, where its weight is the same in every call: quantized once, or in every call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import crossgrain as cg

from .timing import Job, least_times

SHAPES = ((1, 1024, 1024), (1, 2048, 2048), (16, 1024, 1024))  # rows, inputs, outputs
RECIPES = ("mxfp8", "nvfp4", "fp8", "mxfp8-fwd-nvfp4-bwd")


@dataclass(frozen=True)
class Timing:
    """Times of a call, in multiples of fp32."""

    recipe: str
    shape: tuple[int, int, int]
    every_call: float
    once: float


def run(shapes: tuple[tuple[int, int, int], ...], only: str, repeats: int) -> list[Timing]:
    found = []
    for shape in shapes:
        rows, inputs, outputs = shape
        x, plain = torch.randn(rows, inputs), nn.Linear(inputs, outputs)
        wanted = [recipe for recipe in RECIPES if only in recipe]
        jobs: list[Job] = [_call(plain, x, reuse=True)]
        for recipe in wanted:
            layer = nn.Linear(inputs, outputs)
            cg.convert(layer, recipe)
            jobs += [_call(layer, x, reuse=False), _call(layer, x, reuse=True)]
        fp32, *others = least_times(jobs, repeats)
        found += [
            Timing(recipe, shape, every / fp32, once / fp32)
            for recipe, every, once in zip(wanted, others[::2], others[1::2], strict=True)
        ]
    return found


def _call(layer: nn.Module, x: torch.Tensor, reuse: bool) -> Job:
    def call() -> None:
        with torch.no_grad(), cg.settings.override(reuse_unchanged_weights=reuse):
            layer(x)

    return call


def rows(timings: list[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.recipe, "x".join(map(str, t.shape)), f"{t.every_call:.2f}", f"{t.once:.2f}"] for t in timings]
