"""Small models for the tests of exports, and what their layers multiply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.linear import function
from crossgrain.planes import Plane

ONLY_FORWARD = "fprop: {}, dgrad: hp, wgrad: hp"


def mlp(recipe: str | None = None, *, width: int = 64, hidden: int = 128, dtype: torch.dtype = torch.float32) -> Any:
    """Two linear layers, one without a bias, and a norm."""
    model = nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, width, bias=False)
    )
    model.to(dtype)
    if recipe is not None:
        cg.convert(model, recipe)
    return model


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, from its shards."""
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        own = load_file(directory / file)
        assert not found.keys() & own.keys()
        found.update(own)
    return found


def multiplied(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Plane]:
    """The operands that fprop reads of the weights, in the order of the layers."""
    planes: list[Plane] = []
    gemm = function.gemm

    def watched(which: str, a: Any, b: Any, **options: Any) -> Any:
        if which == "fprop":
            planes.append(b)
        return gemm(which, a, b, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(function, "gemm", watched)
        model(x)
    return planes


def bytes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every byte of the state of a model."""
    from ..common.saved_models import contents

    return contents(model)
