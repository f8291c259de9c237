"""Fusible operations in a sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import crossgrain as cg
from crossgrain import ops

from .common import DTYPE, WIDTH, Results, Run, Step, backward, gradient, numbers, of_parameters, trained
from .recipes import RECIPES

_OPTIONS: Any = {"dtype": DTYPE}


def _block() -> nn.Module:
    return ops.Sequential(
        ops.LayerNorm(WIDTH, **_OPTIONS),
        ops.Linear(WIDTH, 2 * WIDTH, **_OPTIONS),
        ops.GELU(),
        ops.Linear(2 * WIDTH, WIDTH, **_OPTIONS),
        ops.ConstantScale(0.5),
        ops.Quantize(),
        ops.RMSNorm(WIDTH, **_OPTIONS),
        ops.Linear(WIDTH, 2 * WIDTH, bias=False, **_OPTIONS),
        ops.SwiGLU(),
        ops.Dropout(0.1),
    )


def _sequence(device: str, recipe: str) -> Step:
    return partial(trained, _block().to(device), numbers(device, 64, WIDTH), RECIPES[recipe]())


def _grouped(device: str, recipe: str) -> Step:
    block = ops.Sequential(
        ops.GroupedLinear(2, WIDTH, 2 * WIDTH, **_OPTIONS),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(2, WIDTH, WIDTH, **_OPTIONS),
    ).to(device)
    x, scales = numbers(device, 64, WIDTH), numbers(device, 64)
    sizes = torch.tensor([32, 32])

    def step() -> Results:
        with cg.autocast(recipe=RECIPES[recipe]()):
            y = block(x, sizes, scales, sizes)
        backward(y)
        return {"y": y.detach(), "dx": gradient(x), "d scales": gradient(scales)} | of_parameters(block)

    return step


RUNS: dict[str, Run] = {
    **{f"operations {recipe}": partial(_sequence, recipe=recipe) for recipe in RECIPES},
    **{f"operations grouped {recipe}": partial(_grouped, recipe=recipe) for recipe in ("mxfp8", "nvfp4", "fp8")},
}
SHORT = ["operations fp8", "operations fp8_delayed", "operations nvfp4", "operations grouped mxfp8"]
