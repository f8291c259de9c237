"""Every module in training, by every kind of recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

import crossgrain as cg

from .common import OPTIONS, ROWS, WIDTH, Run, training
from .recipes import RECIPES


def _in_groups(model: nn.Module, x: Tensor) -> Any:
    return model(x, [ROWS // 2, 0, ROWS // 2])


MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Linear": (partial(cg.Linear, WIDTH, 2 * WIDTH, **OPTIONS), {}),
    "LayerNormLinear": (partial(cg.LayerNormLinear, WIDTH, WIDTH, **OPTIONS), {}),
    "LayerNormMLP": (partial(cg.LayerNormMLP, WIDTH, 2 * WIDTH, normalization="RMSNorm", **OPTIONS), {}),
    "GroupedLinear": (partial(cg.GroupedLinear, 3, WIDTH, WIDTH, **OPTIONS), {"call": _in_groups}),
    "TransformerLayer": (
        partial(cg.TransformerLayer, WIDTH, 2 * WIDTH, 4, attention_dropout=0.0, hidden_dropout=0.0, **OPTIONS),
        {"shape": (16, 4, WIDTH)},
    ),
}
RUNS: dict[str, Run] = {
    f"{module} {recipe}": training(make, RECIPES[recipe], **options)
    for module, (make, options) in MODULES.items()
    for recipe in RECIPES
}
SHORT = [f"Linear {recipe}" for recipe in RECIPES] + [
    "LayerNormLinear fp8_delayed",
    "LayerNormMLP fp8_line",
    "GroupedLinear mxfp8",
    "GroupedLinear fp8_delayed",
    "TransformerLayer hybrid",
]
