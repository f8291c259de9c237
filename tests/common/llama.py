"""A tiny Llama of Hugging Face's, and its training without any client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossgrain as cg

from .tiny_models import tiny_llama

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
STEPS = 3


def llama() -> nn.Module:
    torch.manual_seed(0)
    return tiny_llama(tie_word_embeddings=False)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (2, 16), generator=generator) for _ in range(STEPS)]


def with_our_layers(model: nn.Module) -> nn.Module:
    """Its linear layers replaced by ours with the same weights."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            ours = cg.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            ours.load_state_dict(child.state_dict(), strict=False)
            setattr(model, name, ours.to(child.weight.dtype))
        else:
            with_our_layers(child)
    return model


def our_layers(model: nn.Module) -> int:
    return sum(isinstance(module, cg.Linear) for module in model.modules())


def trained(
    model: nn.Module, recipe: cg.recipe.Recipe, *, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a plain loop with `crossgrain.autocast`, in torch's autocast unless it is fp32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        rest: Any = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()
        with rest, cg.autocast(recipe=recipe):
            return model(input_ids=tokens, labels=tokens).loss

    return losses(step, optimizer, torch.Tensor.backward), list(model.parameters())


def losses(
    step: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, backward: Callable[[torch.Tensor], Any]
) -> list[float]:
    found = []
    for tokens in batches():
        loss = step(tokens)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
