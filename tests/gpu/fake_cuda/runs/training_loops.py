"""What training loops do around a step: microbatches, recomputation, evaluation, policies, offloading, states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain.nn.cross_entropy import parallel_cross_entropy

from .common import OPTIONS, ROWS, WIDTH, Results, Run, Step, backward, gradient, numbers, of_parameters, trained
from .recipes import RECIPES, SOME

_CHECKPOINTS = {
    "ours": partial(cg.checkpoint, use_reentrant=False),
    "ours reentrant": partial(cg.checkpoint, use_reentrant=True),
    "torch": partial(torch_checkpoint, use_reentrant=False),
}


def _mlp(**options: Any) -> nn.Module:
    return cg.LayerNormMLP(WIDTH, 2 * WIDTH, **OPTIONS, **options)


def _accumulated(device: str, recipe: str) -> Step:
    model: Any = _mlp(fuse_wgrad_accumulation=True).to(device)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=device)
    x = numbers(device, ROWS, WIDTH)

    def step() -> Results:
        for first in (True, False):
            with cg.autocast(recipe=RECIPES[recipe]()):
                y = model(x, is_first_microbatch=first)
            backward(y)
        main = {f"main {name}": parameter.main_grad for name, parameter in model.named_parameters()}
        return {"y": y.detach(), "dx": gradient(x)} | main

    return step


def _deferred(device: str) -> Step:
    model = cg.Linear(WIDTH, WIDTH, delay_wgrad_compute=True, **OPTIONS).to(device)
    x = numbers(device, ROWS, WIDTH)

    def step() -> Results:
        with cg.autocast(recipe=RECIPES["mxfp8"]()):
            y = model(x)
        backward(y)
        model.backward_dw()
        return {"dx": gradient(x)} | of_parameters(model)

    return step


def _recomputed(device: str, recipe: str, how: str) -> Step:
    call = _CHECKPOINTS[how]
    return partial(trained, _mlp().to(device), numbers(device, ROWS, WIDTH), RECIPES[recipe](), call)


def _evaluated(device: str, recipe: str, kept: bool) -> Step:
    with cg.quantized_model_init(enabled=kept, recipe=RECIPES[recipe]()):
        model: Any = _mlp().to(device)
    x = numbers(device, ROWS, WIDTH)

    def step() -> Results:
        with torch.no_grad(), cg.autocast(recipe=RECIPES[recipe]()):
            first = model(x)
            model.layer_norm_weight.add_(0.5)
            return {"first": first, "second": model(x)}

    return step


def _policy(device: str, policy: Any, recipe: str) -> Step:
    inner = partial(trained, _mlp().to(device), numbers(device, ROWS, WIDTH), RECIPES[recipe]())

    def step() -> Results:
        with cg.settings.override(nonfinite=policy):
            return inner()

    return step


def _offloaded(device: str) -> Step:
    """Saved tensors go to host memory, from a stream that is not the default one."""
    model, x = _mlp().to(device), numbers(device, ROWS, WIDTH)

    def step() -> Results:
        offload = cg.offload(min_bytes=1)
        with torch.Stream(device) if device == "cuda" else offload, offload:
            found = trained(model, x, RECIPES["mxfp8"]())
        offload.wait()
        return found

    return step


def _cross_entropy(device: str) -> Step:
    logits = numbers(device, 8, 4, WIDTH)
    target = torch.randint(WIDTH, (8, 4)).to(device)

    def step() -> Results:
        loss = parallel_cross_entropy(logits, target)
        loss.sum().backward()
        return {"loss": loss.detach(), "dx": gradient(logits)}

    return step


def _loaded(device: str, recipe: str) -> Step:
    """A model that goes on from a checkpoint of the CPU."""
    saved = _mlp()
    trained(saved, numbers("cpu", ROWS, WIDTH), RECIPES[recipe]())
    model = _mlp(device=device)
    model.load_state_dict(saved.state_dict())
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES[recipe]())


def _materialised(device: str, recipe: str) -> Step:
    """A model without memory that gets it on the device."""
    saved = _mlp()
    model = _mlp(device="meta").to_empty(device=device)
    model.load_state_dict(saved.state_dict())
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES[recipe]())


def _moved(device: str, recipe: str) -> Step:
    """A module that has trained on the CPU before it is moved."""
    model = _mlp()
    trained(model, numbers("cpu", ROWS, WIDTH), RECIPES[recipe]())
    model.zero_grad()
    return partial(trained, model.to(device), numbers(device, ROWS, WIDTH), RECIPES[recipe]())


def _moved_back(device: str, recipe: str) -> Step:
    """A module that has trained on the device, and was elsewhere in between."""
    model = _mlp().to(device)
    trained(model, numbers(device, ROWS, WIDTH), RECIPES[recipe]())
    model.zero_grad()
    model.to("cpu").to(device)
    return partial(trained, model, numbers(device, ROWS, WIDTH), RECIPES[recipe](), steps=3)


RUNS: dict[str, Run] = {
    **{f"loop accumulated {recipe}": partial(_accumulated, recipe=recipe) for recipe in SOME},
    **{f"loop moved {recipe}": partial(_moved, recipe=recipe) for recipe in SOME},
    **{f"loop moved back {recipe}": partial(_moved_back, recipe=recipe) for recipe in SOME},
    **{f"loop loaded {recipe}": partial(_loaded, recipe=recipe) for recipe in SOME},
    **{f"loop materialised {recipe}": partial(_materialised, recipe=recipe) for recipe in SOME},
    **{f"loop evaluated {recipe}": partial(_evaluated, recipe=recipe, kept=False) for recipe in SOME},
    **{f"loop evaluated kept {recipe}": partial(_evaluated, recipe=recipe, kept=True) for recipe in SOME},
    **{
        f"loop recomputed {how} {recipe}": partial(_recomputed, recipe=recipe, how=how)
        for how in _CHECKPOINTS
        for recipe in SOME
    },
    **{
        f"loop {policy} {recipe}": partial(_policy, policy=policy, recipe=recipe)
        for policy in ("raise", "saturate")
        for recipe in SOME
    },
    "loop deferred": _deferred,
    "loop offloaded": _offloaded,
    "loop cross entropy": _cross_entropy,
}
SHORT = ["loop accumulated hybrid", "loop moved fp8_delayed", "loop moved delayed_hybrid", "loop loaded fp8_delayed"]
SHORT += [
    "loop moved back fp8_delayed",
    "loop moved back delayed_hybrid",
    "loop materialised fp8",
    "loop evaluated nvfp4",
    "loop evaluated kept fp8_delayed",
    "loop raise mxfp8",
]
SHORT += ["loop recomputed ours nvfp4", "loop recomputed torch fp8_delayed", "loop saturate nvfp4", *list(RUNS)[-3:]]
