"""Optimizers on weights that are kept quantized, and on plain ones with masters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain import optim
from crossgrain.optim import multi_tensor

from .common import OPTIONS, ROWS, WIDTH, Results, Run, Step, numbers, trained
from .recipes import RECIPES

KEPT = ("fp8", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "hybrid", "delayed_hybrid", "mxfp4", "2d")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdam": partial(optim.FusedAdam, master_weights=True),
    "FusedAdam capturable": partial(optim.FusedAdam, master_weights=True, capturable=True),
    "FusedAdam small states": partial(
        optim.FusedAdam, master_weights=True, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16
    ),
    "FusedSGD": partial(optim.FusedSGD, lr=0.1, momentum=0.9),
    "with_masters AdamW": partial(optim.with_masters, torch.optim.AdamW, lr=1e-3, foreach=True),
}


def _kept(device: str, recipe: str, optimizer: str) -> Step:
    with cg.quantized_model_init(recipe=RECIPES[recipe](), preserve_high_precision_init_val=True):
        first, second = cg.Linear(WIDTH, 2 * WIDTH, **OPTIONS), cg.LayerNormMLP(2 * WIDTH, WIDTH, **OPTIONS)
    model = nn.Sequential(first, nn.GELU(), second).to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES[recipe](), None, made)


def _remainders(device: str) -> Step:
    model = cg.Linear(WIDTH, WIDTH, **OPTIONS).to(device)
    made = optim.FusedAdam(model.parameters(), master_weights=True, store_param_remainders=True)
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES["mxfp8"](), None, made)


def _torch(device: str) -> Step:
    """An optimizer that knows nothing of quantized weights: crossgrain looks whether updates are lost."""
    with cg.quantized_model_init(recipe=RECIPES["mxfp8"]()):
        model = cg.Linear(WIDTH, WIDTH, **OPTIONS).to(device)
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES["mxfp8"](), None, made)


def _lists(device: str, is_set: bool) -> Step:
    def tensors() -> list[Tensor]:
        return [torch.randn(8, 8).abs().to(device) for _ in range(2)]

    grads, params, first, second = tensors(), tensors(), tensors(), tensors()
    flag = torch.full((1,), int(is_set), dtype=torch.int32).to(device)
    apply = multi_tensor.multi_tensor_applier

    def step() -> Results:
        norm, each = apply(multi_tensor.multi_tensor_l2norm, flag, [grads], True)
        unscaled, _ = apply(multi_tensor.multi_tensor_unscale_l2norm, flag, [grads], norm, False)
        apply(multi_tensor.multi_tensor_scale, flag, [grads, grads], 0.5)
        moments = [grads, params, first, second]
        apply(multi_tensor.multi_tensor_adam, flag, moments, 1e-3, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
        apply(multi_tensor.multi_tensor_sgd, flag, moments[:3], 0.1, 0.9, 0.0, 0.1, False, False, False)
        return {"norm": norm, "each": each, "unscaled": unscaled, "flag": flag, "param": params[0], "first": first[1]}

    return step


RUNS: dict[str, Run] = {
    **{
        f"optimizers {name} {recipe}": partial(_kept, recipe=recipe, optimizer=name)
        for name in OPTIMIZERS
        for recipe in KEPT
    },
    "optimizers remainders": _remainders,
    "optimizers of torch": _torch,
    "optimizers lists": partial(_lists, is_set=False),
    "optimizers lists with a flag": partial(_lists, is_set=True),
}
SHORT = ["optimizers FusedAdam fp8_delayed", "optimizers FusedAdam capturable nvfp4", "optimizers FusedSGD hybrid"]
SHORT += ["optimizers FusedAdam small states mxfp8", "optimizers with_masters AdamW 2d", *list(RUNS)[-4:]]
