"""What a run is, and the steps that most of them share.

A run prepares a model on a device, and returns the step that is watched. The step returns its results by name. The
same run on the CPU says what they should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.recipe import Recipe

Results = dict[str, Tensor]
Step = Callable[[], Results]
Run = Callable[[str], Step]

WIDTH, ROWS = 64, 64
DTYPE = torch.bfloat16
OPTIONS: dict[str, Any] = {"params_dtype": DTYPE}


def numbers(device: str, *shape: int) -> Tensor:
    """Random numbers, the same on every device."""
    return torch.randn(*shape).to(DTYPE).to(device).requires_grad_()


def trained(
    model: nn.Module,
    x: Tensor,
    recipe: Recipe | None = None,
    call: Callable[..., Any] | None = None,
    optimizer: Any = None,
    steps: int = 2,
) -> Results:
    """Forward and backward, and a step of the optimizer if there is one, ``steps`` times. Gradients add up."""
    for _ in range(steps):
        with cg.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x) if call is None else call(model, x)
        y = y[0] if isinstance(y, tuple) else y
        backward(y)
        if optimizer is not None:
            optimizer.step()
    return {"y": y.detach(), "dx": gradient(x)} | of_parameters(model)


def trained_unless_bound(model: nn.Module, x: Tensor, steps: int = 2) -> Results:
    """The same for a converted model, whose recipe an autocast would replace."""
    for _ in range(steps):
        y = model(x)
        backward(y)
    return {"y": y.detach(), "dx": gradient(x)} | of_parameters(model)


def backward(y: Tensor) -> None:
    y.float().square().sum().backward()


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def of_parameters(model: nn.Module) -> Results:
    """The parameters, decoded, and the gradients that are there."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = parameter.detach()
        found[name] = plain.dequantize() if isinstance(plain, cg.QuantizedTensor) else plain
        if parameter.grad is not None:
            found[f"d {name}"] = parameter.grad
    return found


def training(
    make: Callable[[], nn.Module],
    recipe: Callable[[], Recipe],
    shape: Iterable[int] = (ROWS, WIDTH),
    call: Callable[..., Any] | None = None,
) -> Run:
    """A run that trains a module which is made on the CPU and moved to the device."""

    def run(device: str) -> Step:
        model = make().to(device)
        return partial(trained, model, numbers(device, *shape), recipe(), call)

    return run
