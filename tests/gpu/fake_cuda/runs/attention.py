"""Attention: layouts, masks, formats, positions, and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain import recipe as recipes

from .common import DTYPE, OPTIONS, WIDTH, Results, Run, Step, backward, gradient, numbers, trained
from .recipes import RECIPES

HEADS, CHANNELS = 4, 16
_PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}


def _dot_product(
    device: str,
    shape: tuple[int, ...] = (16, 2),
    recipe: Callable[[], recipes.Recipe] | None = None,
    given: Callable[[str], dict[str, Any]] | None = None,
    **options: Any,
) -> Step:
    attention = cg.DotProductAttention(HEADS, CHANNELS, **options).to(device)
    q, k, v = (numbers(device, *shape, HEADS, CHANNELS) for _ in range(3))
    arguments = {} if given is None else given(device)

    def step() -> Results:
        with cg.autocast(enabled=recipe is not None, recipe=None if recipe is None else recipe()):
            y = attention(q, k, v, **arguments)
        backward(y)
        return {"y": y.detach(), "dq": gradient(q), "dk": gradient(k), "dv": gradient(v)}

    return step


def _starts(device: str) -> dict[str, Any]:
    starts = torch.tensor([0, 10, 30], dtype=torch.int32).to(device)  # the last two of 32 tokens are in no sequence
    return {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}


def _starts_and_lengths(device: str) -> dict[str, Any]:
    return _starts(device) | {"max_seqlen_q": 20, "max_seqlen_kv": 20}


def _lengths_in_a_batch(device: str) -> dict[str, Any]:
    starts = torch.tensor([0, 10, 26], dtype=torch.int32).to(device)
    return {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}


def _padding(device: str) -> dict[str, Any]:
    mask = torch.zeros(2, 1, 1, 16, dtype=torch.bool)
    mask[0, ..., 10:] = True
    return {"attention_mask": mask.to(device)}


def _multihead(device: str) -> Step:
    model = cg.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, input_layernorm=True, **OPTIONS).to(device)
    rope = cg.RotaryPositionEmbedding(WIDTH // HEADS).to(device)

    def call(model: nn.Module, x: Tensor) -> Any:
        return model(x, rotary_pos_emb=rope(x.shape[0]))

    return partial(trained, model, numbers(device, 16, 2, WIDTH), RECIPES["mxfp8"](), call)


def _generating(device: str) -> Step:
    layer = cg.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, self_attn_mask_type="causal", layer_number=1, **OPTIONS)
    layer = layer.to(device).eval()
    cache = cg.InferenceParams(2, 16, HEADS, WIDTH // HEADS, dtype=DTYPE, device=device)
    prompt, token = numbers(device, 6, 2, WIDTH), numbers(device, 1, 2, WIDTH)

    def step() -> Results:
        found = {}
        with torch.no_grad(), cg.autocast(recipe=RECIPES["mxfp8"]()):
            cache.pre_step({0: 6, 1: 4})
            found["prompt"] = layer(prompt, inference_params=cache)
            cache.pre_step({0: 1, 1: 1})
            found["token"] = layer(token, inference_params=cache)
        return found

    return step


RUNS: dict[str, Run] = {
    "attention causal": _dot_product,
    "attention window": partial(_dot_product, window_size=(4, 0)),
    "attention padding": partial(_dot_product, given=_padding, attn_mask_type="padding"),
    "attention lengths": partial(_dot_product, given=_lengths_in_a_batch, attn_mask_type="padding"),
    "attention packed": partial(_dot_product, shape=(32,), given=_starts_and_lengths, **_PACKED),
    "attention packed without lengths": partial(_dot_product, shape=(32,), given=_starts, **_PACKED),
    "attention learnable softmax": partial(_dot_product, softmax_type="learnable"),
    "attention off-by-one softmax": partial(_dot_product, softmax_type="off-by-one"),
    "attention fp8": partial(_dot_product, recipe=partial(recipes.DelayedScaling, fp8_dpa=True)),
    "attention mxfp8": partial(_dot_product, recipe=partial(recipes.as_recipe, "all: mxfp8, attention: mxfp8")),
    "attention multihead": _multihead,
    "attention generating": _generating,
}
SHORT = ["attention lengths", "attention packed", "attention packed without lengths", "attention fp8"]
SHORT += ["attention multihead", "attention generating"]
