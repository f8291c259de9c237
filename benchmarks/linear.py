"""Forward and backward of one linear layer, relative to fp32 ``nn.Linear``: what a user of a recipe pays.

Both have a bias; input, weight and bias get gradients; the weight is quantized in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from crossgrain.recipe.zoo import mxfp8_fwd_nvfp4_bwd_factory

from .timing import Job, least_times

Shape = tuple[int, int, int]  # tokens, in_features, out_features
Forward = Callable[[Tensor], Tensor]
MakeLayer = Callable[[int, int], tuple[nn.Module, Forward]]  # the module, and how to call it

SHAPES: tuple[Shape, ...] = ((2048, 2048, 2048), (512, 1024, 1024), (128, 512, 512), (64, 256, 256))
HYBRID = "MXFP8 forward, NVFP4 backward"
TARGETS = {
    "NVFP4": dict(zip(SHAPES, (0.60, 0.75, 1.3, 2.2), strict=True)),
    "MXFP8": dict(zip(SHAPES, (1.03, 1.12, 1.45, 2.0), strict=True)),
    HYBRID: dict(zip(SHAPES, (0.75, 0.95, 1.6, 2.4), strict=True)),
}


@dataclass(frozen=True)
class Timing:
    """``ratio`` is the layer's time over that of fp32 ``nn.Linear``, ``target`` what it is meant to be."""

    library: str
    name: str
    shape: Shape
    milliseconds: float
    ratio: float
    target: float | None


def layers() -> dict[str, MakeLayer]:
    """Our layers by name."""
    recipes: dict[str, Recipe] = {
        "MXFP8": MXFP8BlockScaling(),
        "NVFP4": NVFP4BlockScaling(),  # rotation, stochastic rounding and 16x16 tiles
        "FP8 current": Float8CurrentScaling(),
        "FP8 delayed": DelayedScaling(),
        "FP8 block": Float8BlockScaling(),
        HYBRID: CustomRecipe(qfactory=mxfp8_fwd_nvfp4_bwd_factory),  # rotation and stochastic rounding
    }
    return {name: _with(recipe) for name, recipe in recipes.items()}


def _with(recipe: Recipe) -> MakeLayer:
    def make(in_features: int, out_features: int) -> tuple[nn.Module, Forward]:
        layer = cg.Linear(in_features, out_features)

        def forward(x: Tensor) -> Tensor:
            with cg.autocast(recipe=recipe):
                y: Tensor = layer(x)
            return y

        return layer, forward

    return make


def plain(in_features: int, out_features: int) -> tuple[nn.Module, Forward]:
    layer = nn.Linear(in_features, out_features)
    return layer, layer


def run(
    shapes: Sequence[Shape], libraries: Mapping[str, Mapping[str, MakeLayer]], repeats: int
) -> tuple[dict[Shape, float], list[Timing]]:
    """Seconds of fp32 ``nn.Linear`` by shape, and all layers of all libraries relative to it."""
    contestants = [(library, name, make) for library, by_name in libraries.items() for name, make in by_name.items()]
    seconds_of_plain, timings = {}, []
    for shape in shapes:
        steps = [step(plain, shape), *(step(make, shape) for _, _, make in contestants)]
        seconds_of_plain[shape], *times = least_times(steps, repeats)
        for (library, name, _), seconds in zip(contestants, times, strict=True):
            target = TARGETS.get(name, {}).get(shape) if library == "crossgrain" else None
            timings.append(Timing(library, name, shape, seconds * 1e3, seconds / seconds_of_plain[shape], target))
    return seconds_of_plain, timings


def step(make: MakeLayer, shape: Shape) -> Job:
    """One forward and backward pass of a new layer."""
    tokens, in_features, out_features = shape
    module, forward = make(in_features, out_features)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, in_features, generator=generator, requires_grad=True)
    dy = torch.randn(tokens, out_features, generator=generator)

    def run_once() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        forward(x).backward(dy)

    return run_once


def rows(plain: Mapping[Shape, float], timings: Sequence[Timing]) -> list[list[str]]:
    """Cells of a table: a layer a row, a shape a column, the target in brackets."""
    found: dict[tuple[str, str], list[str]] = {("torch", "fp32"): [f"{s * 1e3:.1f} ms" for s in plain.values()]}
    for t in timings:
        cell = f"{t.ratio:.2f}" + (f" ({t.target:.2f})" if t.target else "")
        found.setdefault((t.library, t.name), []).append(cell)
    return [[*names, *cells] for names, cells in found.items()]
