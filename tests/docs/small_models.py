"""What pages about the lab and about files call `model`, `batches` and so on, small enough to run in a test."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.lab import GPT, GPTConfig

CONFIG = GPTConfig(layers=1, width=32, heads=1, context=32)


class Model(GPT):
    """A GPT that is called as models of Hugging Face are."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor | SimpleNamespace:
        logits = super().forward(inputs)
        if labels is None:
            return logits
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Blocks(torch.nn.Module):
    """A stack of layers."""

    def __init__(self, kind: type[torch.nn.Module] = torch.nn.Linear, count: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind(64, 64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def checkpoint() -> tuple[Model, torch.optim.Optimizer]:
    """The same model at every call, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(CONFIG)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    """Random bytes to predict."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (4, 33), generator=generator) for _ in range(count)]
    return [{"inputs": each[:, :-1], "labels": each[:, 1:]} for each in tokens]


def branch(recipe: cg.GemmRecipe | str | None, seed: int) -> Iterator[float]:
    """The losses of a run with a recipe, or in high precision."""
    model, optimizer = checkpoint()
    if recipe is not None:
        cg.convert(model, recipe)
    for batch in batches(60):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
