"""Forward and backward of a small GPT by several recipes, relative to fp32, and what its linear layers save.

The model is plain torch, changed by one `convert`. Saved for backward counts what the linear layers hand
to autograd: in fp32 their inputs (their weights are parameters and cost nothing more), in low precision
the columnwise planes of inputs and weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.gpt.model import GPT, GPTConfig

from .timing import Job, least_times

CONFIG, BATCH = GPTConfig(layers=2, width=512, heads=8, context=256), 4  # 1024 tokens
QUICK_CONFIG = GPTConfig(layers=1, width=64, heads=2, context=32)
RECIPES = {"mxfp8": 1.08, "mxfp8-fwd-nvfp4-bwd": 0.95, "nvfp4": 0.80, "fp8": None, "fp8-block": None}
MOST_SAVED = {"mxfp8-fwd-nvfp4-bwd": 0.45}


@dataclass(frozen=True)
class Timing:
    """``ratio`` and ``saved`` are multiples of fp32, with what they are meant to be."""

    recipe: str
    milliseconds: float
    ratio: float
    target: float | None
    saved: float
    most_saved: float | None


def run(config: GPTConfig, repeats: int) -> tuple[float, list[Timing]]:
    """Seconds of the fp32 step, and each recipe relative to it."""
    generator = torch.Generator().manual_seed(0)
    values, following = torch.randint(0, 256, (2, BATCH, config.context), generator=generator).unbind()
    torch.manual_seed(0)
    plain = GPT(config)
    models = {"fp32": plain}
    for recipe in RECIPES:
        models[recipe] = copy.deepcopy(plain)
        cg.convert(models[recipe], recipe)
    seconds = least_times([step(model, values, following) for model in models.values()], repeats)
    saved = [bytes_saved_by_linear_layers(model, values, following) for model in models.values()]
    timings = [
        Timing(recipe, time * 1e3, time / seconds[0], target, kept / saved[0], MOST_SAVED.get(recipe))
        for (recipe, target), time, kept in zip(RECIPES.items(), seconds[1:], saved[1:], strict=True)
    ]
    return seconds[0], timings


def step(model: GPT, values: Tensor, following: Tensor) -> Job:
    def run_once() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(values, following).backward()

    return run_once


def bytes_saved_by_linear_layers(model: GPT, values: Tensor, following: Tensor) -> int:
    """What is saved inside the linear layers, parameters aside, each memory once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[tuple[int, Any], int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes[tensor.data_ptr(), tensor.shape] = tensor.nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    handles = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda *_: hooks.__enter__()))
            handles.append(module.register_forward_hook(lambda *_: hooks.__exit__()))
    loss = model.loss(values, following)  # kept until the end: what is freed could be counted twice
    for handle in handles:
        handle.remove()
    del loss
    return sum(sizes.values())


def rows(plain: float, timings: Sequence[Timing]) -> list[list[str]]:
    def cell(value: float, target: float | None) -> str:
        return f"{value:.2f}" + (f" ({target:.2f})" if target else "")

    found = [["fp32", f"{plain * 1e3:.1f} ms", "1.00"]]
    return found + [[t.recipe, cell(t.ratio, t.target), cell(t.saved, t.most_saved)] for t in timings]
