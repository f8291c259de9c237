"""Models of plain torch that were converted: before and after they were moved to the device."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import crossgrain as cg
from crossgrain.gpt.model import GPT, GPTConfig

from .common import DTYPE, ROWS, WIDTH, Results, Run, Step, backward, numbers, of_parameters, trained_unless_bound
from .recipes import RECIPES, SOME


def _mlp() -> nn.Module:
    inner = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), *inner).to(DTYPE)


def _moved_after(device: str, recipe: str) -> Step:
    model = _mlp()
    cg.convert(model, RECIPES[recipe]())
    backward(model(numbers("cpu", ROWS, WIDTH)))  # whatever state it makes is made on the CPU
    model.zero_grad()
    return partial(trained_unless_bound, model.to(device), numbers(device, ROWS, WIDTH))


def _moved_before(device: str, recipe: str) -> Step:
    model = _mlp().to(device)
    cg.convert(model, RECIPES[recipe]())
    return partial(trained_unless_bound, model, numbers(device, ROWS, WIDTH))


def _gpt(device: str, recipe: str) -> Step:
    model = GPT(GPTConfig(layers=2, width=WIDTH, heads=2, context=32)).to(device)
    cg.convert(model, RECIPES[recipe]())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    text, following = (torch.randint(256, (2, 32)).to(device) for _ in range(2))

    def step() -> Results:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model.loss(text, following)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return {"loss": loss.detach()} | of_parameters(model)

    return step


def _torch_attention(device: str) -> Step:
    model = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0).to(DTYPE).to(device)
    cg.convert(model, "all: mxfp8, attention: mxfp8")
    return partial(trained_unless_bound, model, numbers(device, 32, 2, WIDTH))


def _patches(device: str) -> Step:
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 4, stride=4), nn.Flatten(2)).to(DTYPE).to(device)
    cg.convert(model, "mxfp8", include=["0"])
    return partial(trained_unless_bound, model, numbers(device, 2, 3, 32, 32))


def _scheduled(device: str) -> Step:
    model = _mlp().to(device)
    schedule = cg.ScheduledConversion(model, "nvfp4; from step 1: mxfp8")
    x = numbers(device, ROWS, WIDTH)

    def step() -> Results:
        for _ in range(2):
            found = trained_unless_bound(model, x, steps=1)
            schedule.step()
        return found

    return step


RUNS: dict[str, Run] = {
    **{f"models moved after {recipe}": partial(_moved_after, recipe=recipe) for recipe in RECIPES},
    **{f"models moved before {recipe}": partial(_moved_before, recipe=recipe) for recipe in RECIPES},
    **{f"models gpt {recipe}": partial(_gpt, recipe=recipe) for recipe in SOME},
    "models torch attention": _torch_attention,
    "models patches": _patches,
    "models scheduled": _scheduled,
}
SHORT = ["models moved after fp8_line", "models moved after fp8_delayed", "models moved before fp8_line"]
SHORT += ["models gpt mxfp8", "models torch attention", "models patches", "models scheduled"]
