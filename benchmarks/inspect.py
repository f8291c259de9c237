"""What an Inspector costs: a look in multiples of a training step, and a step that is not looked at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crossgrain.convert import convert
from crossgrain.gpt import GPT, PRESETS, GPTConfig
from crossgrain.gpt.training import Preset
from crossgrain.lab import Inspector

SIZES = ("small", "medium")
QUICK = {"quick": Preset(GPTConfig(layers=1, width=64, heads=2, context=32), batch=4, steps=1, learning_rate=1e-3)}
RECIPES = ("mxfp8", "mxfp8-fwd-nvfp4-bwd", "nvfp4")
WHAT_IF = ("nvfp4", "mxfp8")
EVERY = 100


@dataclass(frozen=True)
class Timing:
    """A look, and a step without one while an Inspector is there; both in multiples of a step without an Inspector."""

    size: str
    recipe: str
    what_if: int
    step_seconds: float
    look: float
    idle: float

    @property
    def share(self) -> float:
        """The cost of a look every 100 steps, as a share of the CPU time."""
        return self.look / EVERY


def run(quick: bool, only: str, repeats: int) -> list[Timing]:
    presets = QUICK if quick else {size: PRESETS[size] for size in SIZES}
    return [
        timed(size, preset, recipe, what_if, repeats)
        for size, preset in presets.items()
        for recipe in RECIPES
        if only.lower() in recipe
        for what_if in ((), WHAT_IF)
    ]


def timed(size: str, preset: Preset, recipe: str, what_if: Sequence[str], repeats: int) -> Timing:
    torch.manual_seed(0)
    config = preset.model
    model = GPT(config)
    convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate)
    values = torch.randint(256, (preset.batch, config.context))

    def step() -> None:
        model.loss(values, values).backward()
        optimizer.step()
        optimizer.zero_grad()

    look = Inspector(model, every=3, what_if=what_if)
    look.open()

    def timed_step(inspected: bool) -> float:
        start = time.thread_time()
        step()
        if inspected:
            look.step()
        return time.thread_time() - start

    found = []
    for _ in range(repeats + 1):
        # Of three steps the first is looked at. The second has no Inspector in its time, the third has one that waits.
        found.append((timed_step(True), timed_step(False), timed_step(True)))
        look.step()
    look.close()
    looked, plain, idle = (min(times) for times in zip(*found[1:], strict=True))  # kernels are compiled in the first
    return Timing(size, recipe, len(what_if), plain, looked / plain - 1, idle / plain)


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    return [
        [
            t.size,
            t.recipe,
            f"{t.what_if}",
            f"{t.step_seconds * 1e3:.0f} ms",
            f"{t.look:.2f}",
            f"{t.share:.2%}",
            f"{t.idle:.3f}",
        ]
        for t in timings
    ]
