"""Mixtures of experts: routing, permuting, groups of rows, the exchange between ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.distributed import TokenExchange
from crossgrain.nn import moe

from ....common.experts import Experts, routed
from .common import DTYPE, OPTIONS, WIDTH, Results, Run, Step, backward, gradient, numbers, of_parameters, trained
from .recipes import RECIPES

TOKENS, EXPERTS = 32, 4


def _chosen() -> Tensor:
    """Two experts of each token."""
    return torch.rand(TOKENS, EXPERTS).topk(2).indices


def _routing(device: str) -> Tensor:
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, _chosen(), True).to(device)


def _permuting(device: str, map_type: Literal["mask", "index"], rows: int) -> Step:
    x = numbers(device, TOKENS, WIDTH)
    routing = _routing(device) if map_type == "mask" else _chosen().to(torch.int32).to(device)

    def step() -> Results:
        sorted_rows, places = moe.moe_permute(x, routing, rows, map_type=map_type)
        y = moe.moe_unpermute(sorted_rows, places, map_type=map_type)
        backward(y)
        return {"rows": sorted_rows.detach(), "places": places, "y": y.detach(), "dx": gradient(x)}

    return step


def _permuting_with_probs(device: str, pad: bool) -> Step:
    x, mask = numbers(device, TOKENS, WIDTH), _routing(device)
    probs = torch.rand(TOKENS, EXPERTS).to(device).requires_grad_()
    counts = mask.sum(0)

    def step() -> Results:
        if pad:
            rows, picked, places, _, _ = moe.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
        else:
            rows, picked, places = moe.moe_permute_with_probs(x, probs, mask, 2 * TOKENS)
        y = moe.moe_unpermute(rows * picked[:, None].to(DTYPE), places, restore_shape=x.shape)
        backward(y)
        return {"y": y.detach(), "dx": gradient(x), "d probs": gradient(probs)}

    return step


def _sorting_chunks(device: str) -> Step:
    x = numbers(device, TOKENS, WIDTH)
    sizes, order = torch.tensor([8, 0, 20, 4]).to(device), torch.tensor([2, 0, 3, 1]).to(device)

    def step() -> Results:
        y = moe.moe_sort_chunks_by_index(x, sizes, order)
        backward(y)
        return {"y": y.detach(), "dx": gradient(x)}

    return step


def _scoring(device: str) -> Step:
    logits = torch.randn(TOKENS, EXPERTS).to(device).requires_grad_()

    def step() -> Results:
        probs, chosen = moe.fused_topk_with_score_function(logits, 2, False, 2, 1, 2.0, "sigmoid", None)
        _, scores = moe.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
        loss = moe.fused_moe_aux_loss(scores, chosen.sum(0), TOKENS, EXPERTS, 2, 0.1)
        (probs.square().sum() + loss).backward()
        return {"probs": probs.detach(), "chosen": chosen, "loss": loss.detach(), "dx": gradient(logits)}

    return step


def _padded_groups(device: str) -> Step:
    layer = cg.GroupedLinear(3, WIDTH, WIDTH, **OPTIONS).to(device)
    pad, unpad = cg.Fp8Padding(3), cg.Fp8Unpadding(3)
    sizes = [5, 20, 7]

    def call(model: nn.Module, x: Tensor) -> Any:
        rows, padded = pad(x, sizes)
        return unpad(model(rows, padded), sizes)

    return partial(trained, layer, numbers(device, TOKENS, WIDTH), RECIPES["mxfp8"](), call)


def _sizes_on_the_device(device: str) -> Step:
    layer = cg.GroupedLinear(3, WIDTH, WIDTH, **OPTIONS).to(device)
    sizes = torch.tensor([0, 32, 32]).to(device)
    return partial(trained, layer, numbers(device, 64, WIDTH), RECIPES["mxfp8"](), lambda model, x: model(x, sizes))


def _exchanged(device: str, counts_on_device: bool) -> Step:
    layer = cg.GroupedLinear(3, WIDTH, WIDTH, **OPTIONS).to(device)
    x = numbers(device, 64, WIDTH)
    counts: Any = torch.tensor([0, 32, 32]).to(device) if counts_on_device else [0, 32, 32]
    recipe = cg.recipe.as_recipe("all: mxfp8, input.source: dequantized")
    quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)

    def step() -> Results:
        exchange = TokenExchange(counts)
        with cg.autocast(recipe=recipe):
            y = exchange.combine(layer(exchange.dispatch(x, quantizer), exchange.sizes))
        backward(y)
        return {"y": y.detach(), "dx": gradient(x)} | of_parameters(layer)

    return step


def _converted(device: str, recipe: str) -> Step:
    experts = Experts(hidden=WIDTH, width=2 * WIDTH).to(DTYPE).to(device)
    cg.convert(experts, RECIPES[recipe]())
    x = numbers(device, TOKENS, WIDTH)
    index, weights = (each.to(device) for each in routed(TOKENS, EXPERTS))

    def step() -> Results:
        y = experts(x, index, weights.to(DTYPE))
        backward(y)
        return {"y": y.detach(), "dx": gradient(x)} | of_parameters(experts)

    return step


RUNS: dict[str, Run] = {
    "experts permute mask": partial(_permuting, map_type="mask", rows=2 * TOKENS),
    "experts permute mask and zeros": partial(_permuting, map_type="mask", rows=3 * TOKENS),
    "experts permute mask unknown count": partial(_permuting, map_type="mask", rows=-1),
    "experts permute index": partial(_permuting, map_type="index", rows=2 * TOKENS),
    "experts permute index and drop": partial(_permuting, map_type="index", rows=TOKENS),
    "experts permute with probs": partial(_permuting_with_probs, pad=False),
    "experts permute and pad": partial(_permuting_with_probs, pad=True),
    "experts sort chunks": _sorting_chunks,
    "experts router": _scoring,
    "experts padded groups": _padded_groups,
    "experts sizes on the device": _sizes_on_the_device,
    "experts exchange": partial(_exchanged, counts_on_device=False),
    "experts exchange with counts on the device": partial(_exchanged, counts_on_device=True),
    "experts converted mxfp8": partial(_converted, recipe="mxfp8"),
    "experts converted nvfp4": partial(_converted, recipe="nvfp4"),
}
SHORT = list(RUNS)[:-1]
