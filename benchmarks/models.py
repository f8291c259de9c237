"""Whole models by several recipes, relative to fp32, and torchao doing the same work, if it is installed.

    demo     the small GPT that `make demo` trains, with its optimizer: layers so small that what is paid is Python
    GPT      two layers, 512 wide, 1024 tokens: forward + backward
    Llama    Hugging Face's, four layers, 512 wide, 512 tokens: forward + backward, if transformers is installed

Every model is plain torch, changed by one `crossgrain.convert`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import crossgrain as cg
from crossgrain.gpt.model import GPT
from crossgrain.gpt.training import PRESETS

from . import gpt, others
from .timing import Job, least_times

RECIPES = ("mxfp8", "mxfp8-fwd-nvfp4-bwd", "nvfp4", "fp8")
TARGETS = {
    ("GPT", "mxfp8"): 1.08,
    ("GPT", "mxfp8-fwd-nvfp4-bwd"): 0.95,
    ("GPT", "nvfp4"): 0.80,
    ("demo", "mxfp8-fwd-nvfp4-bwd"): 1.5,
}
NO_TRANSFORMERS = (
    "transformers is not installed, so there is no Llama: .venv/bin/pip install -c constraints/clients.txt transformers"
)
Convert = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Model:
    """A model, and a step of it: a new job for each copy."""

    name: str
    make: Callable[[], nn.Module]
    step: Callable[[Any], Job]


@dataclass(frozen=True)
class Timing:
    """``ratio`` is a multiple of fp32, ``target`` what it is meant to be."""

    model: str
    library: str
    recipe: str
    milliseconds: float
    ratio: float
    target: float | None


def models(quick: bool) -> list[Model]:
    found = [_demo(), _gpt(quick)]
    return [*found, _llama(quick)] if find_spec("transformers") else found


def run(quick: bool, only: str, repeats: int) -> list[Timing]:
    """fp32, our recipes and what torchao can do, interleaved."""
    theirs: dict[str, Convert] = others.model_conversions() if others.installed() else {}
    timings = []
    for model in models(quick):
        torch.manual_seed(0)
        plain = model.make()
        variants = [("torch", "fp32", plain)]
        for recipe in (recipe for recipe in RECIPES if only in recipe):
            converted = copy.deepcopy(plain)
            cg.convert(converted, recipe)
            variants.append(("crossgrain", recipe, converted))
        variants += [("torchao", name, convert(copy.deepcopy(plain))) for name, convert in theirs.items()]
        seconds = least_times([model.step(variant) for *_, variant in variants], repeats)
        targets = {} if quick else TARGETS
        timings += [
            Timing(model.name, library, recipe, time * 1e3, time / seconds[0], targets.get((model.name, recipe)))
            for (library, recipe, _), time in zip(variants, seconds, strict=True)
        ]
    return timings


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Cells of a table."""
    found = []
    for t in timings:
        cell = f"{t.milliseconds:.1f} ms" if t.recipe == "fp32" else f"{t.ratio:.2f}"
        found.append([t.model, t.library, t.recipe, cell + (f" ({t.target:.2f})" if t.target else "")])
    return found


def _demo() -> Model:
    preset = PRESETS["tiny"]

    def step(model: Any) -> Job:
        optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate)
        train = gpt.step(model, *_bytes(preset.batch, preset.model.context))

        def run_once() -> None:
            train()
            optimizer.step()

        return run_once

    return Model("demo", lambda: GPT(preset.model), step)


def _gpt(quick: bool) -> Model:
    config = gpt.QUICK_CONFIG if quick else gpt.CONFIG
    return Model("GPT", lambda: GPT(config), lambda model: gpt.step(model, *_bytes(gpt.BATCH, config.context)))


def _bytes(batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, following = torch.randint(0, 256, (2, batch, context), generator=torch.Generator().manual_seed(0)).unbind()
    return values, following


def _llama(quick: bool) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, tokens = (64, 1, 32) if quick else (512, 4, 512)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=1024,
        use_cache=False,
    )
    ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))

    def step(model: Any) -> Job:
        def run_once() -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()

        return run_once

    return Model("Llama", lambda: LlamaForCausalLM(config), step)
